"""What a checksum cannot see in a checkpoint: a state that is whole, but of no use to this run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fedglimpse.errors import UserError
from fedglimpse.plugins import users_fault
from fedglimpse.storage import store
from fedglimpse.storage.checkpoint import RESTART

MISFITS = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)


def check_lane(path: Path, saved: Mapping[str, Any], like: Tensor) -> None:
    """Raise UserError where the model or the counters of a federation cannot be right.

    Args:
        path: of the checkpoint, for the error message.
        saved: `state` and `visits`, perhaps `round`.
        like: a model of the run.  # [d]
    """
    state = saved.get("state")
    if not isinstance(state, Tensor) or state.layout != like.layout or state.is_meta:
        raise _misfit(path, "it holds no model")
    if state.shape != like.shape or state.dtype != like.dtype:
        kind = f"{list(state.shape)} of {state.dtype}"
        raise _misfit(path, f"its model is {kind}, not {list(like.shape)} of {like.dtype}")
    if not bool(state.isfinite().all()):
        raise _misfit(path, "its model has numbers that are not finite")
    if type(saved.get("visits")) is not int or saved["visits"] < 0:
        raise _misfit(path, f"visits={saved.get('visits')!r} is no count")


def check_round(path: Path, value: object, rounds: int) -> None:
    """Raise UserError where a checkpoint is of a round that the run does not have."""
    if type(value) is not int or not 0 <= value <= rounds:
        raise _misfit(path, f"round={value!r} is none of 0 to {rounds}")


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turn an error while a state is loaded into one sentence; a user's own code has its own."""
    try:
        yield
    except UserError:
        raise
    except MISFITS as error:
        if users_fault(error) is not None:
            raise
        raise _misfit(path, f"it does not fit this run, {type(error).__name__}") from None


def _misfit(path: Path, reason: str) -> UserError:
    return store.damage(path, reason, RESTART, "--resume")
