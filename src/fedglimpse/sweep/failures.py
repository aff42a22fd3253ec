"""What a failed pack means: for whom, and whether the sweep can go on."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from fedglimpse.errors import UserError
from fedglimpse.sweep.folder import SweepFolder
from fedglimpse.sweep.plan import Cell


def reason_of(error: BaseException) -> str:
    """Return one line: a user's mistake as it is, anything else with its place."""
    if isinstance(error, UserError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno})" if frames else ""
    said = str(error).partition("\n")[0]  # CUDA's errors go on with advice
    return f"{type(error).__name__}: {said}{place}"


def concerns_the_folder(error: BaseException) -> bool:
    """True where nothing can be written any more, which no cell is to blame for."""
    return isinstance(error, UserError) and isinstance(error.__cause__, OSError | RuntimeError)


def split_or_blame(folder: SweepFolder, pack: Sequence[Cell], reason: str) -> list[list[Cell]]:
    """Return two halves to try again, or record the failure where one cell is left.

    Halving finds the guilty cell in a few steps, and also makes room where memory was short.
    """
    left = folder.left(pack)
    if len(left) == 1:
        folder.fail(left[0], reason)
    middle = len(left) // 2
    return [left[:middle], left[middle:]] if len(left) > 1 else []
