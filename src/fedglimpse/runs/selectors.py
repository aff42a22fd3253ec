"""The selectors of several lanes, asked in one place: together where they offer it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from fedglimpse.simulation.plugin_checks import check_choice
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
                budgets[r] = self.methods[r].budget(self.ks[r], view.num_visible)
        answers: list[Choice | None] = [None] * len(views)
        for lanes, group in self._groups:
            group_views = [views[r] for r in lanes]
            choices = group.select(group_views, [budgets[r] for r in lanes])
            for r, choice in zip(lanes, choices, strict=True):
                answers[r] = choice
        for r in self._single:
            view = views[r]
            if view is not None:
                answers[r] = self.methods[r].selector.select(view, budgets[r])
        for r, view in enumerate(views):
            if view is not None:
                check_choice(answers[r], view, budgets[r], self.methods[r].selector)
        return answers

    def feedback(self, outcomes: Outcomes) -> list[Metrics]:
        """Let every lane that has an outcome learn; returns what each logs."""
        metrics: list[Metrics] = [{}] * len(outcomes)
        for lanes, group in self._groups:
            group_metrics = group.feedback([outcomes[r] for r in lanes])
            for r, lane_metrics in zip(lanes, group_metrics, strict=True):
                metrics[r] = lane_metrics
        for r in self._single:
            outcome = outcomes[r]
            if outcome is not None:
                metrics[r] = self.methods[r].selector.feedback(outcome)
        return metrics
