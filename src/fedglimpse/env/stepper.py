"""Lanes of one World, moved step by step from outside: what all environments are built on.

Nothing here needs gymnasium. One step is one communication round; lanes start again one by one,
each with its own seed, while the others go on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedglimpse.agent.history import History
from fedglimpse.env.settings import Settings
from fedglimpse.errors import UserError
from fedglimpse.methods.base import Stateless
from fedglimpse.runs.build import Parts, world_of
from fedglimpse.simulation.plugin_checks import check_choice
from fedglimpse.simulation.world import Lane
from fedglimpse.types import Choice, Outcome, View, Visibility

NOBODY: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class Look:
    """What one lane's server sees before it chooses."""

    seed: int  # of the episode
    round_num: int
    view: View | None  # None: nobody can be chosen, the round will pass
    history: Tensor  # [H+1, D] sketches of the last global models, newest last
    history_mask: Tensor  # [H+1] True where the round exists


@dataclass(frozen=True)
class Step:
    """What came of one round of one lane."""

    record: dict[str, Any]  # as in `rounds.jsonl`, without the wall time
    outcome: Outcome | None  # None: the round passed without training
    reward: float  # smoothed proxy score, the paper's
    reward_per_class: Tensor  # [C]
    terminated: bool  # the target was reached
    truncated: bool  # the horizon was reached


class Outside(Stateless):
    """Stands where a method's selector would be: the choice comes from outside."""

    def __init__(self, needs: frozenset[str]) -> None:
        """Ask for `needs`, whoever chooses."""
        self.needs = needs

    def select(self, view: View, k: int) -> Choice:
        """Refuse: only `LaneStepper.play` chooses."""
        raise UserError("An environment has no selector of its own: give its step an action.")


@dataclass(frozen=True)
class Pinned:
    """A visibility pattern that is the same in every episode."""

    pattern: Visibility
    seed: int

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return who is visible with the pinned seed `[V]`."""
        return self.pattern.visible(self.seed, round_num)


class LaneStepper:
    """R federations that are observed together, played together and restarted one by one."""

    def __init__(self, settings: Settings, num_lanes: int, parts: Parts | None = None) -> None:
        """Build the world.

        Args:
            settings: what to build.
            num_lanes: R, federations side by side.
            parts: dataset and device, where they are there already.
        """
        if num_lanes < 1:
            raise UserError(f"num_envs={num_lanes} is too small: use 1 or more.")
        config = replace(settings.config, seeds=tuple(range(num_lanes)))
        self.settings, self.num_lanes = settings, num_lanes
        self.parts = Parts.of(settings.config) if parts is None else parts
        self.world = world_of(self.parts, [config])
        self.seeds: list[int | None] = [None] * num_lanes  # None: not started yet
        self.histories = [self._history() for _ in range(num_lanes)]
        self.looks: list[Look] = []

    @property
    def k(self) -> int:
        """Clients chosen in a round."""
        return self.settings.config.selection.k

    def restart(self, seeds: Mapping[int, int]) -> None:
        """Begin an episode in some lanes: lane -> seed; call `look` when all have one."""
        for r, seed in seeds.items():
            self.world.restart(r, *self._fresh(seed))
            self.seeds[r], self.histories[r] = seed, self._history()

    def look(self) -> list[Look]:
        """See what there is to choose from, all lanes together; looking twice changes nothing."""
        if None in self.seeds:
            raise UserError("An episode has to begin before its first step: call reset() first.")
        return self._look_at(self.world.views(self.world.start_round()))

    def step(self, slots: Sequence[Tensor | None], again: Mapping[int, int] = NOBODY) -> list[Step]:
        """Run one round of every lane and look at the next; `looks` is what was seen.

        On a GPU the results of the round are read while the clients of the next one train.

        Args:
            slots: for each lane the chosen positions in `Look.view`; None lets the round pass.
            again: lane -> seed of those that begin another episode; their step means nothing.
        """
        if len(self.looks) != self.num_lanes:
            raise UserError("A step needs something to choose from: call reset() first.")
        world = self.world
        choices: list[Choice | None] = []
        for lane, look, chosen in zip(world.lanes, self.looks, slots, strict=True):
            choice = None
            if chosen is not None and look.view is not None:
                choice = check_choice(Choice(chosen), look.view, self.k, lane.method.selector)
            choices.append(choice)
        world.aggregate(world.collect(choices))
        on_test = []
        for r, lane in enumerate(world.lanes):
            on_test.append(r not in again and self._is_evaluated(lane))
        results = world.score(on_test)
        self.looks = []
        self.restart(again)
        training = world.start_round()
        outcomes = results.outcomes()
        records = results.records([{}] * self.num_lanes)
        steps = list(map(self._step, results.lanes, outcomes, records))
        self._look_at(world.views(training))
        return steps

    def _fresh(self, seed: int) -> tuple[Lane, Tensor]:
        """Return a new federation and its initial state `[d]`."""
        config, vary = self.settings.config, self.settings.vary
        home = config.seeds[0]
        lane = self.parts.lane(config, seed if "partition" in vary else home)
        lane.seed = seed
        if "visibility" not in vary:
            lane.visibility = Pinned(lane.visibility, home)
        outside = Outside(self.settings.needs | {"global_sketch"})
        lane.method = replace(lane.method, selector=outside, takes_all=False)
        return lane, self.parts.start(seed if "model" in vary else home)

    def _history(self) -> History:
        config = self.settings.config
        return History(config.agent.history, config.sketch.size)

    def _look_at(self, views: Sequence[View | None]) -> list[Look]:
        self.looks = [self._look(r, view) for r, view in enumerate(views)]
        return self.looks

    def _look(self, r: int, view: View | None) -> Look:
        lane, history = self.world.lanes[r], self.histories[r]
        if view is not None:
            history.push(view.server["global_sketch"], view.round_num)
        sketches, mask = history.window()
        return Look(lane.seed, lane.round_num, view, sketches.clone(), mask)

    def _is_evaluated(self, lane: Lane) -> bool:
        """True where the round that was just played is scored on the test set, as in a run."""
        config = self.settings.config
        return lane.round_num % config.evaluate.every == 0 or lane.round_num == config.rounds

    def _step(self, lane: Lane, outcome: Outcome | None, record: dict[str, Any]) -> Step:
        per_class = lane.reward.per_class
        if per_class is None:
            per_class = torch.zeros(self.parts.dataset.num_classes)
        target, reached = self.settings.target, record["accuracy"]
        if self.settings.target_on == "proxy":
            reached = None if outcome is None else outcome.score
        return Step(
            record=record,
            outcome=outcome,
            reward=lane.reward.total,
            reward_per_class=per_class,
            terminated=target is not None and reached is not None and reached >= target,
            truncated=lane.round_num >= self.settings.config.rounds,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where every lane stands."""
        return {
            "seeds": list(self.seeds),
            "lanes": [self.world.lane_state(r) for r in range(self.num_lanes)],
            "histories": [history.state_dict() for history in self.histories],
            "looking": bool(self.looks),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; what was seen is worked out again."""
        self.restart({r: seed for r, seed in enumerate(state["seeds"]) if seed is not None})
        for r, saved in enumerate(state["lanes"]):
            self.world.load_lane_state(r, saved)
            self.histories[r].load_state_dict(state["histories"][r])
        if state["looking"]:
            self.look()

    def __getstate__(self) -> dict[str, Any]:
        state = copy.deepcopy(self.state_dict())
        return {"settings": self.settings, "num_lanes": self.num_lanes, "state": state}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        LaneStepper.__init__(self, saved["settings"], saved["num_lanes"])
        self.load_state_dict(saved["state"])

    def __deepcopy__(self, memo: dict[int, Any]) -> LaneStepper:
        other = LaneStepper(self.settings, self.num_lanes, self.parts)  # the data is shared
        other.load_state_dict(copy.deepcopy(self.state_dict()))
        return other
