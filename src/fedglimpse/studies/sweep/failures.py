"""What a failed pack means: for whom, and whether the sweep can go on."""

from __future__ import annotations

from collections.abc import Sequence

from fedglimpse.errors import UserError
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.plan import Cell


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
