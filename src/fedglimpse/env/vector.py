"""Many federations as one vector environment: lanes of one World, trained in one call."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from fedglimpse.config.schema import Config
from fedglimpse.env.arrays import Array, Observation, Shape, info_of, observations, slots_of
from fedglimpse.env.episodes import Episodes
from fedglimpse.env.settings import EPISODE_PARTS, settings_of
from fedglimpse.env.spaces import action_space, observation_space, reward_space
from fedglimpse.env.stepper import LaneStepper, Step
from fedglimpse.errors import UserError


class ClientSelectionVector(VectorEnv[Observation, Array, Array]):
    """`ClientSelection` side by side; sub-environments are lanes, and lanes end and begin alone."""

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
            autoreset_mode: when a lane that is over starts again; gymnasium's three modes.
        """
        settings = settings_of(config or {}, reports, target, target_on, vary)
        self.mode = AutoresetMode(autoreset_mode)
        self.metadata = {"render_modes": [], "autoreset_mode": self.mode}
        self.stepper, self.num_envs = LaneStepper(settings, num_envs), num_envs
        self.shape = Shape.of(self.stepper)
        self.action, self.reward, self.render_mode = action, reward, None
        self.single_observation_space = observation_space(self.shape)
        self.single_action_space = action_space(action, self.shape)
        self.reward_space = reward_space(reward, self.shape)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        first = settings.config.seeds[0]
        self._episodes = [Episodes(first + r) for r in range(num_envs)]
        self._over = np.zeros(num_envs, bool)  # lanes whose episode has ended

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
        seeds = _seeds(seed, self.num_envs)
        mask = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        self._restart([r for r in range(self.num_envs) if mask[r]], seeds)
        looks = self.stepper.look()
        infos: dict[str, Any] = {}
        for r in range(self.num_envs):
            if mask[r]:
                infos = self._add(infos, info_of(looks[r], None), r)
        return observations(looks, self.shape), infos

    def step(self, actions: Array) -> tuple[Observation, Array, Array, Array, dict[str, Any]]:
        """Play one round of every lane; a lane that is over starts again as the mode says."""
        before = self._over.nonzero()[0].tolist()  # these start again instead of playing
        if before and self.mode is AutoresetMode.DISABLED:
            raise UserError(f"Lanes {before} are over: reset them with options['reset_mask'].")
        looks = self.stepper.looks or self.stepper.look()
        chosen = [
            None if r in before else slots_of(actions[r], look, self.stepper.k, self._subset)
            for r, look in enumerate(looks)
        ]
        steps = self.stepper.step(chosen, {r: self._episodes[r].begin(None) for r in before})
        looks = self.stepper.looks
        playing = [r for r in range(self.num_envs) if r not in before]
        terminated, truncated = (np.zeros(self.num_envs, bool) for _ in range(2))
        terminated[playing] = [steps[r].terminated for r in playing]
        truncated[playing] = [steps[r].truncated for r in playing]
        self._over = terminated | truncated
        infos: dict[str, Any] = {}
        for r in range(self.num_envs):
            infos = self._add(infos, info_of(looks[r], None if r in before else steps[r]), r)
        if self.mode is AutoresetMode.SAME_STEP and self._over.any():
            infos = self._begin_again(steps)
        seen = observations(self.stepper.looks, self.shape)
        return seen, self._rewards(steps, playing), terminated, truncated, infos

    @property
    def _subset(self) -> bool:
        return self.action == "subset"

    def _begin_again(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Restart the lanes that have just ended, and keep what they saw last in the infos."""
        last = observations(self.stepper.looks, self.shape)
        before, over = self.stepper.looks, self._over.nonzero()[0].tolist()
        self._restart(over)
        looks = self.stepper.look()
        infos: dict[str, Any] = {}
        for r in range(self.num_envs):
            info = info_of(before[r], steps[r])
            if r in over:
                final = {name: values[r].copy() for name, values in last.items()}
                infos = self._add(infos, {"final_obs": final, "final_info": info}, r)
                info = info_of(looks[r], None)
            infos = self._add(infos, info, r)
        return infos

    def _restart(self, lanes: Sequence[int], seeds: Sequence[int | None] | None = None) -> None:
        given = seeds or [None] * self.num_envs
        self.stepper.restart({r: self._episodes[r].begin(given[r]) for r in lanes})
        self._over[list(lanes)] = False

    def _rewards(self, steps: Sequence[Step], playing: Sequence[int]) -> Array:
        """Return the rewards `[R]`, or `[R, C]`; 0 for lanes that started again."""
        if self.reward == "per_class":
            each = [step.reward_per_class.numpy() for step in steps]
        else:
            each = [np.array(step.reward) for step in steps]
        rewards = np.stack(each)
        rewards[[r for r in range(self.num_envs) if r not in playing]] = 0
        return rewards

    def _add(self, infos: dict[str, Any], info: Mapping[str, Any], r: int) -> dict[str, Any]:
        """Add one lane's info; records and last infos stay dictionaries, one for each lane."""
        plain = {k: v for k, v in info.items() if k not in ("record", "final_info")}
        infos = self._add_info(infos, plain, r)
        for name in ("record", "final_info"):
            if name in info:
                empty = np.full(self.num_envs, None, dtype=object)
                infos.setdefault(name, empty)[r] = info[name]
                infos.setdefault(f"_{name}", np.zeros(self.num_envs, bool))[r] = True
        return infos


def _seeds(seed: int | Sequence[int | None] | None, count: int) -> list[int | None]:
    """Return one seed for each lane, as gymnasium's vector environments read `seed`."""
    if seed is None:
        return [None] * count
    if isinstance(seed, int | np.integer):
        return [int(seed) + r for r in range(count)]
    if len(seed) != count:
        raise UserError(f"seed has {len(seed)} entries for {count} lanes: give one for each.")
    return list(seed)
