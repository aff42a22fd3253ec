"""The spaces of observations, actions and rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from fedglimpse.env.arrays import FLAT_LIMIT, Shape, flat_size
from fedglimpse.env.settings import check_option

ACTIONS = ("scores", "subset")
REWARDS = ("paper", "per_class")


def observation_space(shape: Shape) -> spaces.Space[Any]:
    """Return the space of one environment's observations; unused slots are zero."""
    entries: dict[str, spaces.Space[Any]] = {
        "ids": spaces.Box(0, shape.clients - 1, (shape.slots,), np.int64),
        "sizes": spaces.Box(0, shape.largest, (shape.slots,), np.int64),
        "mask": spaces.MultiBinary(shape.slots),
        "history": _unbounded(shape.history, shape.sketch),
        "history_mask": spaces.MultiBinary(shape.history),
    }
    if shape.features:
        entries["clients"] = _unbounded(shape.slots, shape.features)
    if shape.histogram:
        entries["proxy_histogram"] = spaces.Box(0, 1, (shape.classes,), np.float32)
    return spaces.Dict(entries)


def _unbounded(*size: int) -> spaces.Box[np.float32]:
    return spaces.Box(-np.inf, np.inf, size, np.float32)


def flat_space(shape: Shape) -> spaces.Box[np.float32]:
    """Return the space of one environment's flat observations."""
    return spaces.Box(-FLAT_LIMIT, FLAT_LIMIT, (flat_size(shape),), np.float32)


def action_space(form: str, shape: Shape) -> spaces.Box[np.float32] | spaces.MultiBinary:
    """Return the space of actions: a score, or a bit, for each slot."""
    check_option("action", form, ACTIONS)
    if form == "subset":
        return spaces.MultiBinary(shape.slots)
    return spaces.Box(-1, 1, (shape.slots,), np.float32)


def reward_space(form: str, shape: Shape) -> spaces.Box[np.float32]:
    """Return the space of rewards: a number, or one for each class."""
    check_option("reward", form, REWARDS)
    size = (shape.classes,) if form == "per_class" else ()
    return spaces.Box(0, 1, size, np.float32)
