"""`ClientSelectionVector` as the vector environment that Stable-Baselines3 expects."""

from __future__ import annotations

from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from fedglimpse.env.arrays import Array, flatten
from fedglimpse.env.spaces import flat_space
from fedglimpse.env.vector import ClientSelectionVector


class LanesForSB3(VecEnv):
    """`ClientSelectionVector` with flat observations, in the shape of an SB3 `VecEnv`.

    All lanes train in one call of the trainer. An episode that ends restarts within the same step,
    as SB3 expects it, and its last observation is in `info["terminal_observation"]`.
    """

    def __init__(self, num_envs: int, **arguments: Any) -> None:
        """Build `num_envs` lanes; `arguments` are those of `ClientSelectionVector`."""
        self.lanes = ClientSelectionVector(
            num_envs,
            autoreset_mode="SameStep",
            **arguments,
        )
        super().__init__(
            num_envs,
            observation_space=flat_space(self.lanes.shape),
            action_space=self.lanes.single_action_space,
        )
        self._actions: Array = np.zeros(0)  # of the step that `step_wait` will run

    def reset(self) -> Array:
        """Begin an episode in every lane, with the seeds of `seed()` where it was called."""
        has_seeds = any(seed is not None for seed in self._seeds)
        seeds = list(self._seeds) if has_seeds else None
        observation, _ = self.lanes.reset(seed=seeds)
        self._reset_seeds()
        self._reset_options()
        return flatten(observation, self.lanes.shape)

    def step_async(self, actions: Array) -> None:
        """Store the actions for `step_wait`."""
        self._actions = actions

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:
        """Run one round of every lane."""
        observation, rewards, terminated, truncated, infos = self.lanes.step(self._actions)
        done = terminated | truncated
        out_of_time = truncated & ~terminated
        lane_infos = []
        for lane in range(self.num_envs):
            if done[lane]:
                info = self._final_info(infos, lane)
                info["TimeLimit.truncated"] = bool(out_of_time[lane])
            else:
                info = {"record": infos["record"][lane]}
            lane_infos.append(info)
        flat = flatten(observation, self.lanes.shape)
        return flat, rewards.astype(np.float32), done, lane_infos

    def _final_info(self, infos: dict[str, Any], lane: int) -> dict[str, Any]:
        """Return the record and the observation of the last round of an episode."""
        last_info = infos["final_info"][lane]
        last_observation = infos["final_obs"][lane]
        return {
            "record": last_info["record"],
            "terminal_observation": flatten(last_observation, self.lanes.shape),
        }

    def close(self) -> None:
        """Close the lanes."""
        self.lanes.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute that all lanes share."""
        shared = getattr(self.lanes, attr_name)
        return [shared] * self._count(indices)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refuse: lanes share their attributes."""
        raise NotImplementedError("lanes have no attributes of their own")

    def env_method(
        self,
        method_name: str,
        *args: Any,
        indices: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Refuse: lanes are no objects with methods."""
        raise NotImplementedError("lanes have no methods of their own")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """No lane is wrapped."""
        return [False] * self._count(indices)

    def _count(self, indices: Any) -> int:
        """Return how many lanes `indices` names; None: all of them."""
        lanes = self._get_indices(indices)
        return len(list(lanes))
