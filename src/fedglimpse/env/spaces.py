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
        "ids": _counts(shape.slots, highest=shape.clients - 1),
        "sizes": _counts(shape.slots, highest=shape.largest),
        "mask": spaces.MultiBinary(shape.slots),
        "history": _unbounded(shape.history, shape.sketch),
        "history_mask": spaces.MultiBinary(shape.history),
    }
    if shape.features:
        entries["clients"] = _unbounded(shape.slots, shape.features)
    if shape.histogram:
        entries["proxy_histogram"] = _shares(shape.classes)
    return spaces.Dict(entries)


def _counts(length: int, highest: int) -> spaces.Box[np.int64]:
    """Return the space of whole numbers from 0."""
    return spaces.Box(
        low=0,
        high=highest,
        shape=(length,),
        dtype=np.int64,
    )


def _shares(*size: int) -> spaces.Box[np.float32]:
    """Return the space of numbers from 0 to 1."""
    return spaces.Box(
        low=0,
        high=1,
        shape=size,
        dtype=np.float32,
    )


def _unbounded(*size: int) -> spaces.Box[np.float32]:
    return spaces.Box(
        low=-np.inf,
        high=np.inf,
        shape=size,
        dtype=np.float32,
    )


def flat_space(shape: Shape) -> spaces.Box[np.float32]:
    """Return the space of one environment's flat observations."""
    return spaces.Box(
        low=-FLAT_LIMIT,
        high=FLAT_LIMIT,
        shape=(flat_size(shape),),
        dtype=np.float32,
    )


def action_space(form: str, shape: Shape) -> spaces.Box[np.float32] | spaces.MultiBinary:
    """Return the space of actions: a score, or a bit, for each slot."""
    check_option("action", form, ACTIONS)
    if form == "subset":
        return spaces.MultiBinary(shape.slots)
    return spaces.Box(
        low=-1,
        high=1,
        shape=(shape.slots,),
        dtype=np.float32,
    )


def reward_space(form: str, shape: Shape) -> spaces.Box[np.float32]:
    """Return the space of rewards: a number, or one for each class."""
    check_option("reward", form, REWARDS)
    if form == "per_class":
        return _shares(shape.classes)
    return _shares()
