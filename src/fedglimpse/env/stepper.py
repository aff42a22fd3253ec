"""Lanes of one World whose choices come from outside: what all environments are built on.

Nothing here needs gymnasium. One step is one communication round of every lane; a lane restarts on
its own, with its own seed, while the others continue.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedglimpse.agent.inputs import History
from fedglimpse.env.settings import Settings
from fedglimpse.errors import UserError, require
from fedglimpse.methods.base import Stateless
from fedglimpse.runs.build import WorldSetup, world_of
from fedglimpse.simulation.plugin_checks import check_choice
from fedglimpse.simulation.world import Lane
from fedglimpse.types import Choice, Outcome, View, Visibility

NO_SEEDS: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class LaneObservation:
    """What one lane's server sees before it chooses."""

    seed: int  # of the episode
    round_num: int
    view: View | None  # None: no client can be chosen, the round will pass
    history: Tensor  # [H+1, D] sketches of the last global models, newest last
    history_mask: Tensor  # [H+1] True where the round exists


@dataclass(frozen=True)
class StepResult:
    """The result of one round of one lane."""

    record: dict[str, Any]  # as in `rounds.jsonl`, without the wall time
    outcome: Outcome | None  # None: the round passed without training
    reward: float  # smoothed proxy score, the paper's
    reward_per_class: Tensor  # [C]
    terminated: bool  # the target was reached
    truncated: bool  # the horizon was reached


class ExternalSelector(Stateless):
    """Replaces a method's selector: it asks for reports, and the agent outside chooses."""

    def __init__(self, needs: frozenset[str]) -> None:
        """Ask for the reports `needs`."""
        self.needs = needs

    def select(self, view: View, k: int) -> Choice:
        """Refuse: only `LaneStepper.step` chooses."""
        raise UserError("An environment has no selector of its own: give its step an action.")


@dataclass(frozen=True)
class FixedVisibility:
    """A visibility pattern that is the same in every episode."""

    pattern: Visibility
    seed: int

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the visible clients of the fixed seed, and not of `seed` `[V]`."""
        return self.pattern.visible(self.seed, round_num)


class LaneStepper:
    """R federations that are observed together, stepped together and restarted one by one.

    Call `restart` for every lane, then `observe`, then `step` as often as you like: each step ends
    with the observations of the next round.
    """

    def __init__(
        self,
        settings: Settings,
        num_lanes: int,
        setup: WorldSetup | None = None,
    ) -> None:
        """Build the world.

        Args:
            settings: what to build.
            num_lanes: R, federations side by side.
            setup: dataset and device, where they exist already.
        """
        require(
            num_lanes >= 1, f"num_envs={num_lanes} is too small: use 1 or more.", key="num_envs"
        )
        placeholders = tuple(range(num_lanes))  # seeds until `restart` gives the lanes theirs
        config = replace(settings.config, seeds=placeholders)
        self.settings = settings
        self.num_lanes = num_lanes
        self.setup = WorldSetup.of(settings.config) if setup is None else setup
        self.world = world_of(self.setup, [config])
        self.seeds: list[int | None] = [None] * num_lanes  # None: no episode has begun
        self.histories = [self._new_history() for _ in range(num_lanes)]
        self.observations: list[LaneObservation] = []  # empty until `observe` is called

    @property
    def k(self) -> int:
        """Clients chosen in a round."""
        return self.settings.config.selection.k

    def restart(self, seeds: Mapping[int, int]) -> None:
        """Begin an episode in some lanes: lane -> seed; call `observe` when all have one."""
        for index, seed in seeds.items():
            lane, state = self._new_lane(seed)
            self.world.restart(index, lane, state)
            self.seeds[index] = seed
            self.histories[index] = self._new_history()

    def observe(self) -> list[LaneObservation]:
        """Return what all lanes can choose from; observing twice changes nothing."""
        require(
            None not in self.seeds,
            "An episode has to begin before its first step: call reset() first.",
        )
        training = self.world.start_round()
        return self._observe(self.world.views(training))

    def step(
        self, slots: Sequence[Tensor | None], new_seeds: Mapping[int, int] = NO_SEEDS
    ) -> list[StepResult]:
        """Run one round of every lane, and observe the next one.

        On a GPU the results of the round are read while the clients of the next one train.

        Args:
            slots: for each lane the chosen positions in its view; None lets the round pass.
            new_seeds: lane -> seed of those that begin another episode after this round; their
                result is meaningless.
        """
        require(
            len(self.observations) == self.num_lanes,
            "A step needs something to choose from: call reset() first.",
        )
        world = self.world
        world.aggregate(world.collect(self._choices(slots)))
        on_test = []
        for index, lane in enumerate(world.lanes):
            on_test.append(index not in new_seeds and self._is_evaluated(lane))
        round_results = world.score(on_test)
        self.observations = []
        self.restart(new_seeds)
        training = world.start_round()
        lanes = round_results.lanes
        outcomes = round_results.outcomes()
        records = round_results.records([{}] * self.num_lanes)
        results = []
        for lane, outcome, record in zip(lanes, outcomes, records, strict=True):
            results.append(self._result(lane, outcome, record))
        self._observe(world.views(training))
        return results

    def _choices(self, slots: Sequence[Tensor | None]) -> list[Choice | None]:
        """Return the choice of each lane; None where its round passes."""
        choices: list[Choice | None] = []
        for index, lane in enumerate(self.world.lanes):
            view = self.observations[index].view
            chosen = slots[index]
            choice = None
            if view is not None and chosen is not None:
                choice = check_choice(
                    Choice(chosen),
                    view,
                    self.k,
                    lane.method.selector,
                )
            choices.append(choice)
        return choices

    def _new_lane(self, seed: int) -> tuple[Lane, Tensor]:
        """Return the federation of an episode and its initial state `[d]`."""
        config = self.settings.config
        vary = self.settings.vary
        fixed_seed = config.seeds[0]  # of what does not vary
        partition_seed = seed if "partition" in vary else fixed_seed
        lane = self.setup.lane(config, partition_seed)
        visibility = lane.visibility
        if "visibility" not in vary:
            visibility = FixedVisibility(visibility, fixed_seed)
        method = replace(
            lane.method,
            selector=ExternalSelector(self.settings.needs | {"global_sketch"}),
            takes_all=False,
        )
        lane = replace(lane, seed=seed, visibility=visibility, method=method)
        model_seed = seed if "model" in vary else fixed_seed
        return lane, self.setup.start(model_seed)

    def _new_history(self) -> History:
        config = self.settings.config
        return History(1, config.agent.history, config.sketch.size)

    def _observe(self, views: Sequence[View | None]) -> list[LaneObservation]:
        """Store and return the observations of a round that has started."""
        self.observations = []
        for lane, history, view in zip(self.world.lanes, self.histories, views, strict=True):
            if view is not None:
                history.push(0, view.server["global_sketch"], view.round_num)
            observation = LaneObservation(
                seed=lane.seed,
                round_num=lane.round_num,
                view=view,
                history=history.sketches[0].clone(),
                history_mask=history.exists[0].clone(),
            )
            self.observations.append(observation)
        return self.observations

    def _is_evaluated(self, lane: Lane) -> bool:
        """True where the round that has just ended is scored on the test set, as in a run."""
        config = self.settings.config
        is_last = lane.round_num == config.rounds
        return is_last or lane.round_num % config.evaluate.every == 0

    def _result(self, lane: Lane, outcome: Outcome | None, record: dict[str, Any]) -> StepResult:
        per_class = lane.reward.per_class
        if per_class is None:
            per_class = torch.zeros(self.setup.dataset.num_classes)
        accuracy = record["accuracy"]
        if self.settings.target_on == "proxy":
            accuracy = None if outcome is None else outcome.score
        target = self.settings.target
        is_scored = target is not None and accuracy is not None
        return StepResult(
            record=record,
            outcome=outcome,
            reward=lane.reward.total,
            reward_per_class=per_class,
            terminated=is_scored and accuracy >= target,
            truncated=lane.round_num >= self.settings.config.rounds,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every lane."""
        lanes = []
        histories = []
        for index, history in enumerate(self.histories):
            lanes.append(self.world.lane_state(index))
            histories.append(history.state_dict(0))
        return {
            "seeds": list(self.seeds),
            "lanes": lanes,
            "histories": histories,
            "observed": bool(self.observations),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; observations are made again."""
        for index, seed in enumerate(state["seeds"]):
            if seed is not None:
                self.restart({index: seed})
            lane_state = state["lanes"][index]
            self.world.load_lane_state(index, lane_state)
            history_state = state["histories"][index]
            self.histories[index].load_state_dict(0, history_state)
        if state["observed"]:
            self.observe()

    def __getstate__(self) -> dict[str, Any]:
        state = copy.deepcopy(self.state_dict())
        return {"settings": self.settings, "num_lanes": self.num_lanes, "state": state}

    def __setstate__(self, stored: dict[str, Any]) -> None:
        LaneStepper.__init__(self, stored["settings"], stored["num_lanes"])
        self.load_state_dict(stored["state"])

    def __deepcopy__(self, memo: dict[int, Any]) -> LaneStepper:
        stepper = LaneStepper(self.settings, self.num_lanes, self.setup)  # the data is shared
        stepper.load_state_dict(copy.deepcopy(self.state_dict()))
        return stepper
