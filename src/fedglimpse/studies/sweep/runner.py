"""A sweep from its file to its folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedglimpse.config.checks import check
from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.runs.folder import FREE_TO_CHANGE, writing
from fedglimpse.runs.preflight import Readiness
from fedglimpse.runs.signals import stop_on_signals
from fedglimpse.storage.lock import locked
from fedglimpse.studies.sweep import local
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.packs import begun_first, make_packs, wanted
from fedglimpse.studies.sweep.plan import Cell, Plan, configs_of
from fedglimpse.studies.sweep.progress import SweepProgress, Tally, Work
from fedglimpse.studies.sweep.reuse import check_source, not_in, take_over
from fedglimpse.studies.sweep.stop import Stop

BYTES_OF_A_ROUND = 250  # of a finished cell, packed
BYTES_OF_A_LANE = 32e6  # of a running cell: its records and two checkpoints, generously

Play = Callable[
    [SweepFolder, Sequence[Sequence[Cell]], Mapping[str, Config], Stop, SweepProgress], None
]


@dataclass(frozen=True)
class How:
    """How a sweep is run; results do not depend on it."""

    only: Sequence[str] = ()  # `key=value` words: which cells
    budget: float | None = None  # seconds
    lanes: int | None = None  # most cells in a pack; None: what suits the device
    extra: Mapping[str, Any] = field(default_factory=dict)  # engine.*, checkpoint.*, log.*
    reuse: Sequence[Path] = ()  # folders of other sweeps to take finished cells from
    without: Sequence[Path] = ()  # studies whose finished runs are not to be played again
    retry_failed: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Ended:
    """How far a sweep has come, of the cells that were asked for."""

    done: int
    left: int
    failed: Mapping[str, str]  # cell -> reason
    reused: int
    left_out: int  # runs that another study has
    interrupted: bool  # by a signal


def run_sweep(plan: Plan, out: Path, how: How | None = None, play: Play = local.play) -> Ended:
    """Play the cells of a plan that are not done yet, and store each as it finishes.

    Args:
        plan: what is to be run.
        out: the sweep's folder; what is there already is kept and gone on with.
        how: budget, choice of cells and the like.
        play: where packs are computed; another engine brings its own.

    Raises:
        UserError: before anything is written, where the sweep cannot be run there.
    """
    how = how or How()
    _check_extra(how.extra)
    folder, stop = SweepFolder(out), Stop(how.budget)
    folder.check(plan)
    for source in how.reuse:
        check_source(source)
    fits = wanted(how.only)
    configs = configs_of(plan.cells, how.extra)
    folder.check_code(plan.cells, configs)
    cells = [cell for cell in plan.cells if fits(cell, configs[cell.id])]
    if not cells:
        raise UserError(
            f"--only {' '.join(how.only)} leaves no cell of the sweep: it has the variants "
            f"{', '.join(dict.fromkeys(c.variant for c in plan.cells))} in the settings "
            f"{'; '.join(dict.fromkeys(c.setting for c in plan.cells))}."
        )
    asked = len(cells)
    cells = not_in(cells, configs, how.without)
    if not cells:
        return Ended(0, 0, {}, reused=0, left_out=asked, interrupted=False)
    unfinished = ("begun", "new", "failed") if how.retry_failed else ("begun", "new")
    to_play = [cell for cell in cells if folder.state(cell) in unfinished]
    _check_cells(to_play, configs, Readiness(here=play is local.play))
    packs = make_packs(cells, configs, how.lanes)
    _check_room(out, [configs[cell.id] for cell in folder.left(cells)], max(map(len, packs)))
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out, "sweep"):
        folder.check(plan)
        folder.open(plan)
        reused = take_over(folder, cells, configs, how.reuse)
        for cell in cells if how.retry_failed else []:
            folder.forgive(cell)
        packs = begun_first(packs, lambda cell: folder.state(cell) == "begun")
        with (
            stop_on_signals(stop.request),
            SweepProgress(_tally(folder, cells, configs), how.quiet) as progress,
        ):
            play(folder, packs, configs, stop, progress)
    return Ended(
        done=sum(folder.state(cell) == "done" for cell in cells),
        left=len(folder.left(cells)),
        failed={c.id: folder.reason(c) for c in cells if folder.state(c) == "failed"},
        reused=reused,
        left_out=asked - len(cells),
        interrupted=stop.asked,
    )


def _tally(folder: SweepFolder, cells: Sequence[Cell], configs: Mapping[str, Config]) -> Tally:
    states = [folder.state(cell) for cell in cells]
    work = {
        cell.id: Work(configs[cell.id].data.name, configs[cell.id].rounds, folder.played(cell))
        for cell in folder.left(cells)
    }
    return Tally(work, states.count("done"), states.count("failed"))


def _check_extra(extra: Mapping[str, Any]) -> None:
    for name in extra:
        if not name.startswith(FREE_TO_CHANGE):
            raise UserError(
                f"--set {name}: results depend on it, so it belongs into the sweep file; --set "
                f"takes keys that begin with {', '.join(FREE_TO_CHANGE)}."
            )
    try:
        check(resolve(extra))
    except UserError as error:
        raise UserError(f"--set: {error}") from None


def _check_cells(
    cells: Sequence[Cell], configs: Mapping[str, Config], readiness: Readiness
) -> None:
    """Raise UserError for the first cell that cannot be run; seeds share the work."""
    for cell in {(c.setting, c.variant): c for c in cells}.values():
        try:
            readiness.check(configs[cell.id])
        except UserError as error:
            raise UserError(f"Setting '{cell.setting}', '{cell.variant}': {error}") from error


def _check_room(out: Path, configs: Sequence[Config], lanes: int) -> None:
    """Raise UserError where the disk has no room for what is left."""
    there = next(path for path in [out, *out.absolute().parents] if path.exists())
    free = shutil.disk_usage(there).free
    need = BYTES_OF_A_LANE * min(lanes, len(configs))
    need += sum(BYTES_OF_A_ROUND * config.rounds for config in configs)
    if need > free:
        raise UserError(
            f"The sweep needs about {need / 1e6:.0f} MB at {out}, but {free / 1e6:.0f} MB are "
            "free: make room, name another --out, or run less at a time with --lanes and --only."
        )
