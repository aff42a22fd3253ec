"""A sweep from its plan to its folder."""

from __future__ import annotations

import shutil
from collections import Counter
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
from fedglimpse.studies.sweep.choose import (
    begun_first,
    cell_filter,
    check_reusable,
    copy_finished,
    make_packs,
    not_finished_in,
)
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.plan import Cell, Plan, configs_of
from fedglimpse.studies.sweep.progress import CellWork, SweepProgress, SweepStatus
from fedglimpse.studies.sweep.stop import Stop

BYTES_OF_A_ROUND = 250  # of a finished cell, compressed
BYTES_OF_A_LANE = 32e6  # of a running cell: its records and two checkpoints, generously

Engine = Callable[
    [SweepFolder, Sequence[Sequence[Cell]], Mapping[str, Config], Stop, SweepProgress], None
]


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep is run; results do not depend on it."""

    only: Sequence[str] = ()  # `key=value` words: which cells
    budget: float | None = None  # seconds
    lanes: int | None = None  # most cells in a pack; None: what suits the device
    extra: Mapping[str, Any] = field(default_factory=dict)  # engine.*, checkpoint.*, log.*
    reuse: Sequence[Path] = ()  # folders of other sweeps to take finished cells from
    without: Sequence[Path] = ()  # studies whose finished runs are left out
    retry_failed: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class SweepOutcome:
    """How far a sweep has come, of the cells that were chosen."""

    done: int
    left: int
    failed: Mapping[str, str]  # cell -> reason
    reused: int
    left_out: int  # runs that another study has
    interrupted: bool  # by a signal


def run_sweep(
    plan: Plan,
    out: Path,
    options: SweepOptions | None = None,
    run_packs: Engine = local.run_packs,
) -> SweepOutcome:
    """Run the cells of a plan that are not done yet, and store each as it finishes.

    Args:
        plan: what is to be run.
        out: the sweep's folder; a sweep that is already there is resumed.
        options: budget, choice of cells and the like.
        run_packs: where packs are computed; another engine brings its own.

    Raises:
        UserError: before anything is written, if the sweep cannot be run there.
    """
    options = options or SweepOptions()
    _check_extra(options.extra)
    folder = SweepFolder(out)
    stop = Stop(options.budget)
    folder.check(plan)
    for source in options.reuse:
        check_reusable(source)
    configs = configs_of(plan.cells, options.extra)
    folder.check_code(plan.cells, configs)
    chosen = _chosen_cells(plan, configs, options.only)
    cells = not_finished_in(chosen, configs, options.without)
    left_out = len(chosen) - len(cells)
    if not cells:
        return SweepOutcome(0, 0, {}, reused=0, left_out=left_out, interrupted=False)
    readiness = Readiness(on_this_machine=run_packs is local.run_packs)
    _check_cells(_unfinished(folder, cells, options.retry_failed), configs, readiness)
    packs = make_packs(cells, configs, options.lanes)
    _check_disk(out, [configs[cell.id] for cell in folder.left(cells)], max(map(len, packs)))
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    with locked(out, "sweep"):
        folder.check(plan)
        folder.open(plan)
        reused = copy_finished(folder, cells, configs, options.reuse)
        if options.retry_failed:
            for cell in cells:
                folder.forgive(cell)
        packs = begun_first(packs, lambda cell: folder.state(cell) == "begun")
        status = _status(folder, cells, configs)
        with stop_on_signals(stop.request), SweepProgress(status, options.quiet) as progress:
            run_packs(folder, packs, configs, stop, progress)
    return _outcome(folder, cells, reused, left_out, stop.asked)


def _chosen_cells(plan: Plan, configs: Mapping[str, Config], only: Sequence[str]) -> list[Cell]:
    matches = cell_filter(only)
    cells = [cell for cell in plan.cells if matches(cell, configs[cell.id])]
    if not cells:
        variants: dict[str, None] = {}
        settings: dict[str, None] = {}
        for cell in plan.cells:
            variants[cell.variant] = None
            settings[cell.setting] = None
        raise UserError(
            f"--only {' '.join(only)} leaves no cell of the sweep: it has the variants "
            f"{', '.join(variants)} in the settings {'; '.join(settings)}.",
            key="--only",
        )
    return cells


def _unfinished(folder: SweepFolder, cells: Sequence[Cell], with_failed: bool) -> list[Cell]:
    states = ("begun", "new", "failed") if with_failed else ("begun", "new")
    return [cell for cell in cells if folder.state(cell) in states]


def _status(
    folder: SweepFolder, cells: Sequence[Cell], configs: Mapping[str, Config]
) -> SweepStatus:
    states: Counter[str] = Counter(map(folder.state, cells))
    work: dict[str, CellWork] = {}
    for cell in folder.left(cells):
        config = configs[cell.id]
        work[cell.id] = CellWork(config.data.name, config.rounds, folder.rounds_run(cell))
    return SweepStatus(work, states["done"], states["failed"])


def _outcome(
    folder: SweepFolder, cells: Sequence[Cell], reused: int, left_out: int, interrupted: bool
) -> SweepOutcome:
    done = 0
    failed: dict[str, str] = {}
    for cell in cells:
        state = folder.state(cell)
        if state == "done":
            done += 1
        elif state == "failed":
            failed[cell.id] = folder.reason(cell)
    unfinished = len(cells) - done - len(failed)
    return SweepOutcome(done, unfinished, failed, reused, left_out, interrupted)


def _check_extra(extra: Mapping[str, Any]) -> None:
    for name in extra:
        if not name.startswith(FREE_TO_CHANGE):
            raise UserError(
                f"--set {name}: results depend on it, so it belongs into the sweep file; --set "
                f"takes keys that begin with {', '.join(FREE_TO_CHANGE)}.",
                key=name,
            )
    try:
        check(resolve(extra))
    except UserError as error:
        raise UserError(f"--set: {error}", key=error.key) from None


def _check_cells(
    cells: Sequence[Cell], configs: Mapping[str, Config], readiness: Readiness
) -> None:
    """Raise UserError for the first cell that cannot be run; seeds share the work."""
    checked: set[tuple[str, str]] = set()
    for cell in cells:
        if (cell.setting, cell.variant) in checked:
            continue
        checked.add((cell.setting, cell.variant))
        try:
            readiness.check(configs[cell.id])
        except UserError as error:
            raise UserError(
                f"Setting '{cell.setting}', '{cell.variant}': {error}", key=error.key
            ) from error


def _check_disk(out: Path, configs: Sequence[Config], lanes: int) -> None:
    """Raise UserError if the disk has no room for the cells that are left."""
    needed = BYTES_OF_A_LANE * min(lanes, len(configs))
    for config in configs:
        needed += BYTES_OF_A_ROUND * config.rounds
    existing = next(path for path in [out, *out.absolute().parents] if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"The sweep needs about {needed / 1e6:.0f} MB at {out}, but {free / 1e6:.0f} MB are "
            "free: make room, name another --out, or run less at a time with --lanes and --only.",
            key="--out",
        )
