"""A sweep from its plan to its folder: which cells run, which side by side, and what came out.

`--only` picks cells, `--without` leaves out runs that other studies have finished, `--reuse` copies
finished cells from other sweeps. Two cells are the same run if everything that results depend on is
the same, including the user's own code, whatever their settings and variants are called.

A cell is one run of one seed; its state is that of its folder: new, begun, done or failed. A pack
is a group of cells that share a world, so that their clients train together.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedglimpse.config.checks import check
from fedglimpse.config.loading import parse_overrides, read_stored, resolve
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError, nearest
from fedglimpse.plugins import changed_code, importing_no_own_code
from fedglimpse.runs.build import device_of
from fedglimpse.runs.folder import (
    FREE_TO_CHANGE,
    run_identity,
    stored_environment,
    stored_values,
    writing,
)
from fedglimpse.runs.preflight import Readiness
from fedglimpse.runs.provenance import draws_of
from fedglimpse.runs.signals import stop_on_signals
from fedglimpse.runs.threads import available_cores
from fedglimpse.storage import store
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.sweep import local
from fedglimpse.studies.sweep.folder import FORMAT, SweepFolder
from fedglimpse.studies.sweep.packs import begun_first, fixed_packs, most_on_cpu
from fedglimpse.studies.sweep.plan import Cell, Plan, configs_of
from fedglimpse.studies.sweep.progress import CellWork, SweepProgress, SweepStatus
from fedglimpse.studies.sweep.shard import WHOLE, Shard
from fedglimpse.studies.sweep.stop import Stop
from fedglimpse.studies.sweep.workers import Workers
from fedglimpse.version import VERSION

BYTES_OF_A_ROUND = 250  # of a finished cell, compressed
BYTES_OF_A_LANE = 32e6  # of a running cell: its records and two checkpoints, generously

Configs = Mapping[str, Config]  # by id of the cell
Engine = Callable[[SweepFolder, Sequence[Sequence[Cell]], Configs, Stop, SweepProgress], None]


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep is run; results do not depend on it."""

    only: Sequence[str] = ()  # `key=value` words: which cells
    budget: float | None = None  # seconds
    lanes: int | None = None  # most cells in a new pack; None: what suits the device
    workers: int | None = 1  # processes; None: one for each core, on a GPU one
    shard: Shard = WHOLE  # which part of the packs
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
    run_packs: Engine | None = None,
) -> SweepOutcome:
    """Run the cells of a plan that are not done yet, and store each as it finishes.

    Args:
        plan: what is to be run.
        out: the sweep's folder; a sweep that is already there is resumed.
        options: budget, choice of cells and the like.
        run_packs: where packs are computed; None: on this machine, by `options.workers`.

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
    packs = _packs(folder, cells, configs, options)
    cells_of_shard = _joined(options.shard.packs(packs))
    if not cells_of_shard:
        return SweepOutcome(
            done=0,
            left=0,
            failed={},
            reused=0,
            left_out=left_out,
            interrupted=False,
        )
    folder.check_finished(cells_of_shard)
    to_run = _unfinished(folder, cells_of_shard, options.retry_failed)
    readiness = Readiness(on_this_machine=run_packs in (None, local.run_packs))
    _check_cells(to_run, configs, readiness)
    configs_left = [configs[cell.id] for cell in folder.left(cells_of_shard)]
    _check_disk(out, configs_left, lanes=max(map(len, packs)))
    with writing(out):
        store.make_folder(out)
    with ExitStack() as locks:
        with folder.opening():
            locks.enter_context(folder.alone(options.shard))
            folder.check(plan)
            packs = _packs(folder, cells, configs, options)  # another shard may have stored them
            folder.open(plan, packs)
        return _run(folder, configs, options, options.shard.packs(packs), stop, run_packs, left_out)


def _packs(
    folder: SweepFolder, cells: Sequence[Cell], configs: Configs, options: SweepOptions
) -> list[list[Cell]]:
    """Return the packs of all chosen cells, whichever shard runs them."""
    most = most_on_cpu(len(configs), options.shard.count)
    return fixed_packs(folder.stored_packs(), cells, configs, options.lanes, most)


def _joined(packs: Sequence[Sequence[Cell]]) -> list[Cell]:
    """Return the cells of all packs."""
    cells: list[Cell] = []
    for pack in packs:
        cells += pack
    return cells


def _run(
    folder: SweepFolder,
    configs: Configs,
    options: SweepOptions,
    packs: Sequence[list[Cell]],
    stop: Stop,
    run_packs: Engine | None,
    left_out: int,
) -> SweepOutcome:
    """Run packs in a folder that is open and locked."""
    cells = _joined(packs)
    folder.tidy_finished(cells)
    reused = copy_finished(folder, cells, configs, options.reuse)
    if options.retry_failed:
        for cell in cells:
            folder.forgive(cell)
    packs = begun_first(packs, lambda cell: folder.state(cell) == "begun")
    run_packs = run_packs or _engine(options.workers, configs[cells[0].id])
    status = _status(folder, cells, configs)
    with stop_on_signals(stop.request), SweepProgress(status, options.quiet) as progress:
        run_packs(folder, packs, configs, stop, progress)
    return _outcome(folder, cells, reused, left_out, stop.asked)


def _engine(workers: int | None, config: Config) -> Engine:
    """Return what runs packs on this machine: this process, or several."""
    if workers is None:
        workers = available_cores() if device_of(config).type == "cpu" else 1
    return local.run_packs if workers == 1 else Workers(workers).run_packs


def _chosen_cells(
    plan: Plan,
    configs: Configs,
    only: Sequence[str],
) -> list[Cell]:
    """Return the cells that `--only` picks; raises UserError if there are none."""
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


def _unfinished(
    folder: SweepFolder,
    cells: Sequence[Cell],
    with_failed: bool,
) -> list[Cell]:
    states = ("begun", "new", "failed") if with_failed else ("begun", "new")
    return [cell for cell in cells if folder.state(cell) in states]


def _status(folder: SweepFolder, cells: Sequence[Cell], configs: Configs) -> SweepStatus:
    states: Counter[str] = Counter(map(folder.state, cells))
    work: dict[str, CellWork] = {}
    for cell in folder.left(cells):
        config = configs[cell.id]
        work[cell.id] = CellWork(
            group=config.data.name,
            rounds=config.rounds,
            rounds_run=folder.rounds_run(cell),
        )
    return SweepStatus(work, states["done"], states["failed"])


def _outcome(
    folder: SweepFolder,
    cells: Sequence[Cell],
    reused: int,
    left_out: int,
    interrupted: bool,
) -> SweepOutcome:
    done = 0
    failed: dict[str, str] = {}
    for cell in cells:
        state = folder.state(cell)
        if state == "done":
            done += 1
        elif state == "failed":
            failed[cell.id] = folder.reason(cell)
    return SweepOutcome(
        done=done,
        left=len(cells) - done - len(failed),
        failed=failed,
        reused=reused,
        left_out=left_out,
        interrupted=interrupted,
    )


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


def _check_cells(cells: Sequence[Cell], configs: Configs, readiness: Readiness) -> None:
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


def cell_filter(words: Sequence[str]) -> Callable[[Cell, Config], bool]:
    """Return the filter that `--only key=value` words describe.

    Keys are setting and variant (`*` stands for anything), seed, or any key of the configuration.
    A key given several times may have any of its values; different keys must all match.
    """
    allowed: dict[str, list[Any]] = {}
    for word in words:
        key, value = _parse_only(word)
        allowed.setdefault(key, []).append(value)

    def matches(cell: Cell, config: Config) -> bool:
        values = {**config.flat(), "seed": cell.seed}
        names = {"setting": cell.setting.lower(), "variant": cell.variant.lower()}
        for key, choices in allowed.items():
            if key in names:
                name = names[key]
                is_allowed = any(fnmatchcase(name, pattern) for pattern in choices)
            else:
                is_allowed = values[key] in choices
            if not is_allowed:
                return False
        return True

    return matches


def _parse_only(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    keys = ["setting", "variant", "seed", *Config().flat()]
    if not equals:
        raise UserError(
            f"--only {word} is not of the form key=value, such as --only seed=0.", key="--only"
        )
    if key not in keys:
        raise UserError(
            f"--only {word}: there is no key '{key}'.{nearest(key, keys)}", key="--only"
        )
    if key in ("setting", "variant"):
        return key, text.lower()
    return key, parse_overrides([word])[key]


def not_finished_in(
    cells: Sequence[Cell],
    configs: Configs,
    studies: Sequence[Path],
) -> list[Cell]:
    """Return the cells whose runs none of these studies has finished.

    Args:
        cells: of this sweep.
        configs: of each cell, by id.
        studies: stored studies, folders of several of them, or folders of sweeps.
    """
    if not studies:
        return list(cells)
    planned = {cell.id: run_identity(configs[cell.id].flat()) for cell in cells}
    wanted = set(planned.values())  # only these may name code to look for: it is the user's own
    finished: set[str] = set()
    for path in studies:
        with importing_no_own_code():
            study = load_study(path)
        for cell in study.cells:
            if cell.state != "finished":
                continue
            identity = run_identity(cell.config, draws_of(cell.environment))
            if identity in wanted and not changed_code(cell.environment, cell.config):
                finished.add(identity)
    return [cell for cell in cells if planned[cell.id] not in finished]


def check_reusable(path: Path) -> None:
    """Raise UserError if `path` is not a sweep's folder of this version."""
    try:
        plan = json.loads(store.read(path / "sweep.json", key="--reuse"))
    except (OSError, ValueError):
        raise UserError(f"--reuse {path} is not the folder of a sweep.", key="--reuse") from None
    version = plan.get("version")
    if plan.get("format") != FORMAT or version != VERSION:
        raise UserError(
            f"--reuse {path} was written by version {version}, but this is {VERSION}: "
            "its results cannot be reused.",
            key="--reuse",
        )


def copy_finished(
    folder: SweepFolder,
    cells: Sequence[Cell],
    configs: Configs,
    sources: Sequence[Path],
) -> int:
    """Copy cells that other sweeps have finished with the same configuration; return how many."""
    if not sources:
        return 0
    wanted = {run_identity(configs[cell.id].flat()) for cell in cells}
    finished: dict[str, Path] = {}
    for source in sources:
        for summary in sorted((source / "cells").glob("*/summary.json")):
            run = summary.parent
            config = read_stored(stored_values(run)).flat()
            stored = stored_environment(run)
            identity = run_identity(config, draws_of(stored))
            if identity in wanted and not changed_code(stored, config):
                finished[identity] = run
    copied = 0
    for cell in cells:
        identity = run_identity(configs[cell.id].flat())
        if identity in finished and folder.state(cell) == "new":
            _copy_run(finished[identity], folder.of(cell))
            copied += 1
    return copied


def _copy_run(source: Path, target: Path) -> None:
    """Copy a run folder, its summary last: until then the cell is not done."""
    shutil.rmtree(target, ignore_errors=True)
    store.make_folder(target)
    contents: dict[str, bytes] = {}
    for path in sorted(source.iterdir()):
        is_needed = path.is_file() and path.suffix not in (store.TEMPORARY, ".pt")
        if is_needed and path.name != store.MANIFEST:
            contents[path.name] = store.read(path, key="--reuse")
    summary = contents.pop("summary.json")
    store.commit(target, contents)
    store.commit(target, {"summary.json": summary})
