"""Lanes of one World as the vector environment that Stable-Baselines3 expects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from fedglimpse.env.arrays import Array
from fedglimpse.env.vector import ClientSelectionVector
from fedglimpse.env.wrappers import LIMIT, flat_size, flatten


class LanesForSB3(VecEnv):
    """`ClientSelectionVector` with flat observations, in the shape of an SB3 `VecEnv`.

    All lanes train in one call of the trainer. An episode that ends begins again within the same
    step, as SB3 wants it, and its last observation is in `info["terminal_observation"]`.
    """

    def __init__(self, num_envs: int, **words: Any) -> None:
        """Build `num_envs` lanes; `words` are those of `ClientSelectionVector`."""
        self.lanes = ClientSelectionVector(num_envs, autoreset_mode="SameStep", **words)
        box = spaces.Box(-LIMIT, LIMIT, (flat_size(self.lanes.shape),), np.float32)
        super().__init__(num_envs, box, self.lanes.single_action_space)
        self._actions: Array = np.zeros(0)

    def reset(self) -> Array:
        """Begin an episode in every lane, with the seeds of `seed()` where it was called."""
        seeds = None if all(seed is None for seed in self._seeds) else list(self._seeds)
        seen, _ = self.lanes.reset(seed=seeds)
        self._reset_seeds()
        self._reset_options()
        return flatten(seen, self.lanes.shape)

    def step_async(self, actions: Array) -> None:
        """Keep the actions."""
        self._actions = actions

    def step_wait(self) -> tuple[Array, Array, Array, list[dict[str, Any]]]:
        """Play one round of every lane."""
        seen, rewards, terminated, truncated, infos = self.lanes.step(self._actions)
        over = terminated | truncated
        found = [self._info(infos, r, bool(over[r])) for r in range(self.num_envs)]
        for r in over.nonzero()[0]:
            found[r]["TimeLimit.truncated"] = bool(truncated[r] and not terminated[r])
        return flatten(seen, self.lanes.shape), rewards.astype(np.float32), over, found

    def _info(self, infos: dict[str, Any], r: int, over: bool) -> dict[str, Any]:
        """Return the record of the round just played, and the last observation of an episode."""
        if not over:
            return {"record": infos["record"][r]}
        last = flatten(infos["final_obs"][r], self.lanes.shape)
        return {"record": infos["final_info"][r]["record"], "terminal_observation": last}

    def close(self) -> None:
        """Close the lanes."""
        self.lanes.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute that all lanes share."""
        return [getattr(self.lanes, attr_name)] * len(self._places(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Refuse: lanes have no attributes of their own."""
        raise NotImplementedError("lanes have no attributes of their own")

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        """Refuse: lanes have no methods of their own."""
        raise NotImplementedError("lanes have no methods of their own")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """No lane is wrapped."""
        return [False] * len(self._places(indices))

    def _places(self, indices: Any) -> list[int]:
        places: Iterable[int] = self._get_indices(indices)
        return list(places)
