"""Wrappers for agents that expect a flat box of numbers, or a single reward."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv, VectorObservationWrapper
from gymnasium.vector.utils import batch_space

from fedglimpse.env.arrays import Array, Observation, Shape, flatten
from fedglimpse.env.settings import check_option
from fedglimpse.env.spaces import flat_space

OVER_CLASSES = ("mean", "min")


class FlatBox(gym.ObservationWrapper[Array, Array, Observation]):
    """Observations of `ClientSelection` as one row of scaled numbers."""

    def __init__(self, env: gym.Env[Observation, Array]) -> None:
        """Wrap a `ClientSelection`."""
        super().__init__(env)
        self.shape: Shape = env.get_wrapper_attr("shape")
        self.observation_space = flat_space(self.shape)

    def observation(self, observation: Observation) -> Array:
        """Return the flat form of an observation."""
        return flatten(observation, self.shape)


class FlatBoxVector(VectorObservationWrapper):
    """The same for `ClientSelectionVector`."""

    def __init__(self, env: VectorEnv[Observation, Array, Array]) -> None:
        """Wrap a `ClientSelectionVector`."""
        super().__init__(env)
        self.shape: Shape = env.unwrapped.shape  # type: ignore[attr-defined]
        self.single_observation_space = flat_space(self.shape)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def observations(self, observations: Observation) -> Array:
        """Return the flat form of observations, one row for each lane."""
        return flatten(observations, self.shape)


class ScalarReward(gym.RewardWrapper[Any, Array]):
    """Turns `reward="per_class"` into a number: the mean over classes, or the worst class."""

    def __init__(self, env: gym.Env[Any, Array], over_classes: str = "min") -> None:
        """Wrap a `ClientSelection`; `over_classes` is "mean" or "min"."""
        super().__init__(env)
        check_option("over_classes", over_classes, OVER_CLASSES)
        self.over_classes = over_classes

    def reward(self, reward: Any) -> float:
        """Return the mean or the least of the classes' rewards."""
        of_classes = np.asarray(reward)
        if self.over_classes == "min":
            return float(of_classes.min())
        return float(of_classes.mean())
