"""Parts of one study, run here and there, put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fedglimpse.errors import UserError
from fedglimpse.runs.folder import run_identity
from fedglimpse.studies.results.cell import Cell, Partition, Study


def joined(parts: Sequence[Study], source: str) -> Study:
    """Return all cells of the parts; of a cell that several have, the one that got furthest.

    Args:
        parts: at least one; they must have the same title.
        source: where they were read from.

    Raises:
        UserError: for parts of different studies, or with different runs by the same name.
    """
    titles = list(dict.fromkeys(part.title for part in parts))
    if len(titles) > 1:
        raise UserError(
            f"{source} holds parts of different studies ('{titles[0]}' and '{titles[1]}'): keep "
            "each study in a folder of its own."
        )
    cells: dict[tuple[str, str, int], Cell] = {}
    partitions: dict[tuple[str, int], Partition] = {}
    for part in parts:
        for cell in part.cells:
            name = cell.setting, cell.variant, cell.seed
            _check_same(cells.get(name, cell), cell, source)
            if name not in cells or _progress(cell) > _progress(cells[name]):
                cells[name] = cell  # a name that is there already keeps its place
        partitions |= {(one.setting, one.seed): one for one in part.partitions}
    return dataclasses.replace(
        parts[0], cells=list(cells.values()), partitions=list(partitions.values()), source=source
    )


def _check_same(one: Cell, other: Cell, source: str) -> None:
    """Raise UserError where two cells by one name were not run alike: none may hide another."""
    if one.config and other.config and run_identity(one.config) != run_identity(other.config):
        raise UserError(
            f"{source} holds parts with different runs of setting '{one.setting}', variant "
            f"'{one.variant}', seed {one.seed}: keep each study in a folder of its own."
        )


def _progress(cell: Cell) -> tuple[bool, int, bool]:
    played = cell.facts.climb.played if cell.facts is not None else 0
    return cell.state == "finished", played, cell.state == "failed"
