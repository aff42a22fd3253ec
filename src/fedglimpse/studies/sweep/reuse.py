"""Runs that are there already: taken over from other sweeps, or left out of this one.

Two cells are the same run where everything that results depend on is the same, whatever their
settings and variants are called; a user's own code is part of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedglimpse.config.loading import read_stored, read_toml
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.plugins import changed_code
from fedglimpse.runs.folder import run_identity, stored_environment
from fedglimpse.studies.results import load_study
from fedglimpse.studies.sweep.folder import FORMAT, SweepFolder
from fedglimpse.studies.sweep.plan import Cell
from fedglimpse.version import VERSION


def check_source(path: Path) -> None:
    """Raise UserError where `path` is no sweep folder of this version."""
    try:
        plan = json.loads((path / "sweep.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"--reuse {path} is not the folder of a sweep.") from None
    if (plan.get("format"), plan.get("version")) != (FORMAT, VERSION):
        raise UserError(
            f"--reuse {path} was written by version {plan.get('version')}, but this is {VERSION}: "
            "its results are not taken over."
        )


def take_over(
    folder: SweepFolder,
    cells: Sequence[Cell],
    configs: Mapping[str, Config],
    sources: Sequence[Path],
) -> int:
    """Copy finished cells whose configuration is the same; returns how many."""
    finished: dict[str, Path] = {}
    for source in sources:
        for path in sorted((source / "cells").glob("*/summary.json")):
            config = read_stored(read_toml(path.parent / "config.toml")).flat()
            if not changed_code(stored_environment(path.parent), config):
                finished[run_identity(config)] = path.parent
    taken = 0
    for cell in cells:
        source_cell = finished.get(run_identity(configs[cell.id].flat()))
        if source_cell is not None and folder.state(cell) == "new":
            _copy(source_cell, folder.of(cell))
            taken += 1
    return taken


def _copy(source: Path, target: Path) -> None:
    """Copy a run folder, its summary last: until then the cell is not done."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(source.iterdir(), key=lambda p: p.name == "summary.json"):
        if path.is_file() and path.suffix not in (".part", ".pt"):
            part = target / f"{path.name}.part"
            shutil.copyfile(path, part)
            part.replace(target / path.name)


def not_in(
    cells: Sequence[Cell], configs: Mapping[str, Config], studies: Sequence[Path]
) -> list[Cell]:
    """Return the cells whose runs none of these studies holds finished.

    Args:
        cells: of this sweep.
        configs: of each cell, by id.
        studies: stored studies, folders of their parts, or folders of sweeps.
    """
    there = {
        run_identity(cell.config)
        for path in studies
        for cell in load_study(path).cells
        if cell.state == "finished" and not changed_code(cell.environment, cell.config)
    }
    return [cell for cell in cells if run_identity(configs[cell.id].flat()) not in there]
