"""Many federations as one vector environment: lanes of one World, trained in one call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from fedglimpse.config.schema import Config
from fedglimpse.env.arrays import Array, Observation, Shape, as_arrays, chosen_slots, info_of
from fedglimpse.env.episodes import EpisodeSeeds
from fedglimpse.env.settings import EPISODE_PARTS, settings_of
from fedglimpse.env.spaces import action_space, observation_space, reward_space
from fedglimpse.env.stepper import LaneStepper, StepResult
from fedglimpse.errors import UserError

OBJECTS = ("record", "final_info")  # infos that stay dictionaries, one for each lane


class ClientSelectionVector(VectorEnv[Observation, Array, Array]):
    """`ClientSelection` side by side; each lane is one federation with episodes of its own."""

    def __init__(
        self,
        num_envs: int = 1,
        config: Config | Mapping[str, Any] | None = None,
        action: str = "scores",
        reward: str = "paper",
        reports: Collection[str] | None = None,
        target: float | None = None,
        target_on: str = "test",
        vary: Collection[str] = EPISODE_PARTS,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        """Build `num_envs` lanes; the other arguments are those of `ClientSelection`.

        Args:
            num_envs: R, federations side by side.
            config: the same keys as for `fedglimpse.run`.
            action: "scores" or "subset".
            reward: "paper" or "per_class".
            reports: what visible clients report; None: the sketches that `agent.input` names.
            target: accuracy at which an episode is terminated; None: never.
            target_on: "test" or "proxy".
            vary: what a new seed changes.
            autoreset_mode: when a lane whose episode has ended restarts; gymnasium's three modes.
        """
        settings = settings_of(
            config or {},
            reports,
            target,
            target_on,
            vary,
        )
        self.mode = AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": [], "autoreset_mode": self.mode}
        self.num_envs = num_envs
        self.stepper = LaneStepper(settings, num_envs)
        self.shape = Shape.of(self.stepper)
        self.action = action
        self.reward = reward
        self.render_mode = None
        self.single_observation_space = observation_space(self.shape)
        self.single_action_space = action_space(action, self.shape)
        self.reward_space = reward_space(reward, self.shape)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        first_seed = settings.config.seeds[0]
        self._seeds: list[EpisodeSeeds] = []
        for lane in range(num_envs):
            self._seeds.append(EpisodeSeeds(first_seed + lane))
        self._done = np.zeros(num_envs, bool)  # lanes whose episode has ended

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode in every lane, or in those of `options["reset_mask"]`.

        Args:
            seed: of the first lane, the next ones count up; or one for each lane.
            options: `reset_mask`, an array of booleans.
        """
        super().reset(seed=seed if isinstance(seed, int) else None)
        seeds = _seed_of_each_lane(seed, self.num_envs)
        all_lanes = np.ones(self.num_envs, bool)
        mask = (options or {}).get("reset_mask", all_lanes)
        lanes = [lane for lane in range(self.num_envs) if mask[lane]]
        self._restart(lanes, seeds)
        observations = self.stepper.observe()
        infos: dict[str, Any] = {}
        for lane in lanes:
            info = info_of(observations[lane], None)
            infos = self._add_lane_info(infos, info, lane)
        return as_arrays(observations, self.shape), infos

    def step(self, actions: Array) -> tuple[Observation, Array, Array, Array, dict[str, Any]]:
        """Run one round of every lane; a lane whose episode has ended restarts as the mode says."""
        restarting = _lanes_where(self._done)  # these begin an episode instead of a round
        if restarting and self.mode is AutoresetMode.DISABLED:
            raise UserError(
                f"The episodes of lanes {restarting} have ended: reset them with "
                "options['reset_mask'].",
                key="reset_mask",
            )
        slots = self._chosen_slots(actions)
        new_seeds = {}
        for lane in restarting:
            new_seeds[lane] = self._seeds[lane].next()
        steps: list[StepResult | None] = list(self.stepper.step(slots, new_seeds))
        for lane in restarting:
            steps[lane] = None  # its episode has just begun: there was no round
        terminated = np.zeros(self.num_envs, bool)
        truncated = np.zeros(self.num_envs, bool)
        for lane, step in enumerate(steps):
            if step is not None:
                terminated[lane] = step.terminated
                truncated[lane] = step.truncated
        self._done = terminated | truncated
        if self.mode is AutoresetMode.SAME_STEP and self._done.any():
            infos = self._restart_in_same_step(steps)
        else:
            infos = self._infos(steps)
        arrays = as_arrays(self.stepper.observations, self.shape)
        rewards = self._rewards(steps)
        return arrays, rewards, terminated, truncated, infos

    def _chosen_slots(self, actions: Array) -> list[Tensor | None]:
        """Return the chosen slots of each lane; None where its episode has ended."""
        observations = self.stepper.observations or self.stepper.observe()
        slots: list[Tensor | None] = [None] * self.num_envs
        for lane in _lanes_where(~self._done):
            slots[lane] = chosen_slots(
                actions[lane],
                observations[lane],
                self.stepper.k,
                subset=self.action == "subset",
            )
        return slots

    def _restart(self, lanes: Sequence[int], seeds: Sequence[int | None]) -> None:
        """Begin an episode in each of `lanes`; a seed of None: the next in order."""
        new_seeds = {}
        for lane in lanes:
            new_seeds[lane] = self._seeds[lane].next(seeds[lane])
        self.stepper.restart(new_seeds)
        self._done[list(lanes)] = False

    def _infos(self, steps: Sequence[StepResult | None]) -> dict[str, Any]:
        """Return the infos of all lanes; None stands for a lane that has just restarted."""
        infos: dict[str, Any] = {}
        for lane, observation in enumerate(self.stepper.observations):
            info = info_of(observation, steps[lane])
            infos = self._add_lane_info(infos, info, lane)
        return infos

    def _restart_in_same_step(self, steps: Sequence[StepResult | None]) -> dict[str, Any]:
        """Restart the lanes that have just ended, and put what they saw last into the infos."""
        last_lanes = self.stepper.observations
        last_arrays = as_arrays(last_lanes, self.shape)
        ended = _lanes_where(self._done)
        self._restart(ended, [None] * self.num_envs)
        first_lanes = self.stepper.observe()
        infos: dict[str, Any] = {}
        for lane, step in enumerate(steps):
            info = info_of(last_lanes[lane], step)
            if lane in ended:
                last_observation = {}
                for name, values in last_arrays.items():
                    last_observation[name] = values[lane].copy()
                final = {"final_obs": last_observation, "final_info": info}
                infos = self._add_lane_info(infos, final, lane)
                info = info_of(first_lanes[lane], None)
            infos = self._add_lane_info(infos, info, lane)
        return infos

    def _rewards(self, steps: Sequence[StepResult | None]) -> Array:
        """Return the rewards `[R]`, or `[R, C]`; 0 for lanes that have just restarted."""
        if self.reward == "per_class":
            of_classes = np.zeros((self.num_envs, self.shape.classes), np.float32)
            for lane, step in enumerate(steps):
                if step is not None:
                    of_classes[lane] = step.reward_per_class.numpy()
            return of_classes
        rewards = np.zeros(self.num_envs, np.float64)
        for lane, step in enumerate(steps):
            if step is not None:
                rewards[lane] = step.reward
        return rewards

    def _add_lane_info(
        self, infos: dict[str, Any], info: Mapping[str, Any], lane: int
    ) -> dict[str, Any]:
        """Add one lane's info as gymnasium does, but leave dictionaries as they are.

        Gymnasium would turn them into nested arrays, with one entry for each lane.
        """
        plain = {name: value for name, value in info.items() if name not in OBJECTS}
        infos = self._add_info(infos, plain, lane)
        for name in OBJECTS:
            if name not in info:
                continue
            mask_name = f"_{name}"  # gymnasium's name for which lanes have it
            if name not in infos:
                infos[name] = np.full(self.num_envs, None, dtype=object)
                infos[mask_name] = np.zeros(self.num_envs, bool)
            infos[name][lane] = info[name]
            infos[mask_name][lane] = True
        return infos


def _lanes_where(mask: Array) -> list[int]:
    lanes = mask.nonzero()[0]
    return lanes.tolist()


def _seed_of_each_lane(seed: int | Sequence[int | None] | None, count: int) -> list[int | None]:
    """Return one seed for each lane, as gymnasium's vector environments read `seed`."""
    if seed is None:
        return [None] * count
    if isinstance(seed, int | np.integer):
        first_seed = int(seed)
        return list(range(first_seed, first_seed + count))
    if len(seed) != count:
        raise UserError(
            f"seed has {len(seed)} entries for {count} lanes: give one for each.", key="seed"
        )
    return list(seed)
