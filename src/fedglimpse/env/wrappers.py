"""Wrappers for agents that want a flat box of numbers, or a single reward."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv, VectorObservationWrapper
from gymnasium.vector.utils import batch_space

from fedglimpse.env.arrays import Array, Observation, Shape
from fedglimpse.env.spaces import check_word

LIMIT = 10.0  # scaled values beyond this are cut
SCALARS = ("mean", "min")


def flat_size(shape: Shape) -> int:
    """Return the length of a flat observation."""
    each = shape.features + 3  # reports, id, size, mask
    past = shape.history * (shape.sketch + 1)
    return shape.slots * each + past + (shape.classes if shape.histogram else 0)


def flatten(seen: Observation, shape: Shape) -> Array:
    """Turn observations with any leading dimensions into rows of scaled numbers `[..., n]`.

    In this order: reports, standardised within the visible set; id / N; size / sum of visible
    sizes; mask; history, divided by its root mean square; history mask; proxy histogram.
    """
    mask = seen["mask"].astype(np.float32)  # [..., S]
    total = np.maximum(seen["sizes"].sum(-1, keepdims=True), 1)
    known = seen["history_mask"][..., None].astype(np.float32)  # [..., H+1, 1]
    past = seen["history"] * known
    count = np.maximum(known.sum((-2, -1), keepdims=True) * shape.sketch, 1)
    power = np.square(past).sum((-2, -1), keepdims=True) / count
    parts = [
        mask * seen["ids"] / shape.clients,
        seen["sizes"] / total,
        mask,
        _joined(np.clip(past / np.sqrt(power + 1e-12), -LIMIT, LIMIT)),
        seen["history_mask"],
    ]
    if shape.features:
        parts.insert(0, _joined(_standardised(seen["clients"], mask[..., None])))
    if shape.histogram:
        parts.append(seen["proxy_histogram"])
    return np.concatenate([part.astype(np.float32) for part in parts], axis=-1)


def _standardised(rows: Array, mask: Array) -> Array:
    """Z-score columns of `[..., S, F]` over the visible slots; others are 0."""
    count = np.maximum(mask.sum(-2, keepdims=True), 1)
    mean = (rows * mask).sum(-2, keepdims=True) / count
    centred = (rows - mean) * mask
    std = np.sqrt(np.square(centred).sum(-2, keepdims=True) / count)
    return np.clip(centred / (std + 1e-8), -LIMIT, LIMIT)


def _joined(values: Array) -> Array:
    """Join the last two dimensions."""
    return values.reshape(*values.shape[:-2], -1)


def _box(shape: Shape) -> spaces.Box[np.float32]:
    return spaces.Box(-LIMIT, LIMIT, (flat_size(shape),), np.float32)


class FlatBox(gym.ObservationWrapper[Array, Array, Observation]):
    """Observations of `ClientSelection` as one row of scaled numbers."""

    def __init__(self, env: gym.Env[Observation, Array]) -> None:
        """Wrap a `ClientSelection`."""
        super().__init__(env)
        self.shape: Shape = env.get_wrapper_attr("shape")
        self.observation_space = _box(self.shape)

    def observation(self, observation: Observation) -> Array:
        """Return `flatten` of it."""
        return flatten(observation, self.shape)


class FlatBoxVector(VectorObservationWrapper):
    """The same for `ClientSelectionVector`."""

    def __init__(self, env: VectorEnv[Observation, Array, Array]) -> None:
        """Wrap a `ClientSelectionVector`."""
        super().__init__(env)
        self.shape: Shape = env.unwrapped.shape  # type: ignore[attr-defined]
        self.single_observation_space = _box(self.shape)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def observations(self, observations: Observation) -> Array:
        """Return `flatten` of them."""
        return flatten(observations, self.shape)


class ScalarReward(gym.RewardWrapper[Any, Array]):
    """Turns `reward="per_class"` into a number: the mean over classes, or the worst class."""

    def __init__(self, env: gym.Env[Any, Array], over_classes: str = "min") -> None:
        """Wrap a `ClientSelection`; `over_classes` is "mean" or "min"."""
        super().__init__(env)
        check_word("over_classes", over_classes, SCALARS)
        self.over_classes = over_classes

    def reward(self, reward: Any) -> float:
        """Return the mean or the least of the classes' rewards."""
        values = np.asarray(reward)
        return float(values.min() if self.over_classes == "min" else values.mean())
