"""One round of every lane in a world: its selectors, and the state between two rounds."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from fedglimpse.errors import UserError
from fedglimpse.simulation.plugin_checks import check_choice
from fedglimpse.simulation.world import Lane, World
from fedglimpse.types import Choice, Method, Outcome, View

Views = Sequence[View | None]  # of each lane; None: there is nobody to choose from
Outcomes = Sequence[Outcome | None]  # of each lane; None: nobody was chosen
Metrics = Mapping[str, float]


class SelectorGroup(Protocol):
    """Selectors of several lanes that choose and learn in one pass."""

    def select(self, views: Views, ks: Sequence[int]) -> Sequence[Choice | None]:
        """Choose at most `k` clients in every lane that has a view."""

    def feedback(self, outcomes: Outcomes) -> Sequence[Metrics]:
        """Learn in every lane that has an outcome; returns what each logs."""


class Selectors:
    """The selectors of all lanes of a world.

    A selector may offer `group_key`, equal for selectors that can be asked together, and a class
    method `group(selectors)` that returns their `SelectorGroup`. All others are asked one by one.
    """

    def __init__(self, methods: Sequence[Method], ks: Sequence[int]) -> None:
        """Form the groups.

        Args:
            methods: of each lane.
            ks: how many clients each lane may choose (`Method.budget`).
        """
        self.methods = methods
        self.ks = ks
        self._single: list[int] = []  # lanes whose selector is asked by itself
        members: dict[Hashable, list[int]] = {}
        for r, method in enumerate(methods):
            key = getattr(method.selector, "group_key", None)
            if key is None:
                self._single.append(r)
            else:
                members.setdefault((type(method.selector), key), []).append(r)
        self._groups: list[tuple[list[int], SelectorGroup]] = []
        for lanes in members.values():
            selectors: list[Any] = [methods[r].selector for r in lanes]
            self._groups.append((lanes, type(selectors[0]).group(selectors)))

    def select(self, views: Views) -> list[Choice | None]:
        """Return the choice of every lane that has a view; UserError for an illegal one."""
        budgets = [0] * len(views)
        for r, view in enumerate(views):
            if view is not None:
                method = self.methods[r]
                budgets[r] = method.budget(self.ks[r], len(view.ids))
        answers: list[Choice | None] = [None] * len(views)
        for lanes, group in self._groups:
            group_views = [views[r] for r in lanes]
            group_budgets = [budgets[r] for r in lanes]
            choices = group.select(group_views, group_budgets)
            for r, choice in zip(lanes, choices, strict=True):
                answers[r] = choice
        for r in self._single:
            view = views[r]
            if view is not None:
                selector = self.methods[r].selector
                answers[r] = selector.select(view, budgets[r])
        for r, view in enumerate(views):
            if view is not None:
                selector = self.methods[r].selector
                check_choice(answers[r], view, budgets[r], selector)
        return answers

    def feedback(self, outcomes: Outcomes) -> list[Metrics]:
        """Let every lane that has an outcome learn; returns what each logs."""
        metrics: list[Metrics] = [{}] * len(outcomes)
        for lanes, group in self._groups:
            group_outcomes = [outcomes[r] for r in lanes]
            group_metrics = group.feedback(group_outcomes)
            for r, lane_metrics in zip(lanes, group_metrics, strict=True):
                metrics[r] = lane_metrics
        for r in self._single:
            outcome = outcomes[r]
            if outcome is not None:
                selector = self.methods[r].selector
                metrics[r] = selector.feedback(outcome)
        return metrics


def selectors_of(world: World) -> Selectors:
    """Return the selectors of a world's lanes; to be formed again when lanes leave."""
    methods = [lane.method for lane in world.lanes]
    ks = [lane.k for lane in world.lanes]
    return Selectors(methods, ks)


def run_round(
    world: World, on_test: bool | Sequence[bool], selectors: Selectors | None = None
) -> list[dict[str, Any]]:
    """Run one round of every lane from start to end; returns its records.

    `runs/experiment.py` has the loop of whole runs, which also learns while a GPU trains.

    Args:
        world: whose lanes run.
        on_test: score the new models on the test set; for all lanes, or lane by lane.
        selectors: of the lanes; None forms them for this round alone.
    """
    began = time.perf_counter()
    if selectors is None:
        selectors = selectors_of(world)
    if isinstance(on_test, bool):
        on_test = [on_test] * len(world.lanes)
    views = world.views(world.start_round())
    choices = selectors.select(views)
    world.aggregate(world.collect(choices))
    results = world.score(on_test)
    metrics = selectors.feedback(results.outcomes())
    records = results.records(metrics)
    seconds = (time.perf_counter() - began) / len(records)
    for record in records:
        record["seconds"] = seconds
    return records


def snapshot(world: World, lanes: Sequence[Lane] | None = None) -> dict[str, Any]:
    """Return everything needed to continue after the current round, of all or some lanes."""
    saved: list[dict[str, Any]] = []
    for r in positions_of(world, lanes):
        state = world.lane_state(r)
        state["selector"] = world.lanes[r].method.selector.state_dict()
        saved.append(state)
    return {"round": saved[0]["round"], "lanes": saved}


def restore(world: World, state: Mapping[str, Any], lanes: Sequence[Lane] | None = None) -> None:
    """Put all or some lanes back to where `snapshot` was taken."""
    if "lanes" not in state:
        raise UserError(
            f"The run is one on devices, {state['round']} rounds of it: resume it with its Flower "
            "app, or choose another --out.",
            key="--out",
        )
    positions = positions_of(world, lanes)
    for r, saved in zip(positions, state["lanes"], strict=True):
        world.load_lane_state(r, saved)
        selector = world.lanes[r].method.selector
        selector.load_state_dict(saved["selector"])


def positions_of(world: World, lanes: Sequence[Lane] | None) -> list[int]:
    """Return where in the world some of its lanes are; None: all of them."""
    if lanes is None:
        return list(range(len(world.lanes)))
    ids = {id(lane) for lane in lanes}
    return [r for r, lane in enumerate(world.lanes) if id(lane) in ids]
