"""The spaces of observations, actions and rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from fedglimpse.env.arrays import Shape
from fedglimpse.errors import UserError, nearest

ACTIONS = ("scores", "subset")
REWARDS = ("paper", "per_class")


def observation_space(shape: Shape) -> spaces.Space[Any]:
    """Return the space of one environment's observations; unused slots are zero."""
    found: dict[str, spaces.Space[Any]] = {
        "ids": spaces.Box(0, shape.clients - 1, (shape.slots,), np.int64),
        "sizes": spaces.Box(0, shape.largest, (shape.slots,), np.int64),
        "mask": spaces.MultiBinary(shape.slots),
        "history": _numbers(shape.history, shape.sketch),
        "history_mask": spaces.MultiBinary(shape.history),
    }
    if shape.features:
        found["clients"] = _numbers(shape.slots, shape.features)
    if shape.histogram:
        found["proxy_histogram"] = spaces.Box(0, 1, (shape.classes,), np.float32)
    return spaces.Dict(found)


def _numbers(*size: int) -> spaces.Box[np.float32]:
    return spaces.Box(-np.inf, np.inf, size, np.float32)


def action_space(form: str, shape: Shape) -> spaces.Box[np.float32] | spaces.MultiBinary:
    """Return the space of actions: a score, or a bit, for each slot."""
    check_word("action", form, ACTIONS)
    if form == "subset":
        return spaces.MultiBinary(shape.slots)
    return spaces.Box(-1, 1, (shape.slots,), np.float32)


def reward_space(form: str, shape: Shape) -> spaces.Box[np.float32]:
    """Return the space of rewards: a number, or one for each class."""
    check_word("reward", form, REWARDS)
    return spaces.Box(0, 1, (shape.classes,) if form == "per_class" else (), np.float32)


def check_word(key: str, value: str, known: tuple[str, ...]) -> None:
    """Raise UserError unless `value` is one of the known words."""
    if value not in known:
        raise UserError(
            f"{key}={value!r} is unknown.{nearest(str(value), known)} Use {', '.join(known)}."
        )
