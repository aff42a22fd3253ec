"""Which cells of a sweep run, and which of them run side by side.

`--only` picks cells, `--without` leaves out runs that other studies have finished, `--reuse` copies
finished cells from other sweeps. Two cells are the same run if everything that results depend on is
the same, including the user's own code, whatever their settings and variants are called.

Packs depend on the plan alone, never on what is done already: a sweep that was stopped runs the
same cells together as one that was not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedglimpse.config.checks import pick_device
from fedglimpse.config.loading import parse_overrides, read_stored, read_toml
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError, nearest
from fedglimpse.plugins import changed_code
from fedglimpse.runs.build import together_key
from fedglimpse.runs.folder import run_identity, stored_environment
from fedglimpse.studies.results import load_study
from fedglimpse.studies.sweep.folder import FORMAT, SweepFolder
from fedglimpse.studies.sweep.plan import Cell
from fedglimpse.version import VERSION

CPU_LANES = 4
GPU_LANES = {"cifar10": 16, "fashion": 24}  # enough clients at once to fill one large GPU
GPU_LANES_SMALL = 48  # models without convolutions

Configs = Mapping[str, Config]  # by id of the cell


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
                if not any(fnmatchcase(names[key], pattern) for pattern in choices):
                    return False
            elif values[key] not in choices:
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


def not_finished_in(cells: Sequence[Cell], configs: Configs, studies: Sequence[Path]) -> list[Cell]:
    """Return the cells whose runs none of these studies has finished.

    Args:
        cells: of this sweep.
        configs: of each cell, by id.
        studies: stored studies, folders of several of them, or folders of sweeps.
    """
    finished: set[str] = set()
    for path in studies:
        for cell in load_study(path).cells:
            if cell.state == "finished" and not changed_code(cell.environment, cell.config):
                finished.add(run_identity(cell.config))
    return [cell for cell in cells if run_identity(configs[cell.id].flat()) not in finished]


def check_reusable(path: Path) -> None:
    """Raise UserError if `path` is not a sweep's folder of this version."""
    try:
        plan = json.loads((path / "sweep.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(f"--reuse {path} is not the folder of a sweep.", key="--reuse") from None
    if (plan.get("format"), plan.get("version")) != (FORMAT, VERSION):
        raise UserError(
            f"--reuse {path} was written by version {plan.get('version')}, but this is {VERSION}: "
            "its results cannot be reused.",
            key="--reuse",
        )


def copy_finished(
    folder: SweepFolder, cells: Sequence[Cell], configs: Configs, sources: Sequence[Path]
) -> int:
    """Copy cells that other sweeps have finished with the same configuration; return how many."""
    finished: dict[str, Path] = {}
    for source in sources:
        for summary in sorted((source / "cells").glob("*/summary.json")):
            config = read_stored(read_toml(summary.parent / "config.toml")).flat()
            if not changed_code(stored_environment(summary.parent), config):
                finished[run_identity(config)] = summary.parent
    copied = 0
    for cell in cells:
        run = finished.get(run_identity(configs[cell.id].flat()))
        if run is not None and folder.state(cell) == "new":
            _copy_run(run, folder.of(cell))
            copied += 1
    return copied


def _copy_run(source: Path, target: Path) -> None:
    """Copy a run folder, its summary last: until then the cell is not done."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == "summary.json"):
        if path.is_file() and path.suffix not in (".part", ".pt"):
            temporary = target / f"{path.name}.part"
            shutil.copyfile(path, temporary)
            temporary.replace(target / path.name)


def make_packs(cells: Sequence[Cell], configs: Configs, lanes: int | None) -> list[list[Cell]]:
    """Group cells that can share a world, at most `lanes` at a time, of about equal size.

    First seeds come first, so that a sweep that is cut short holds whole comparisons.

    Args:
        cells: in the order of the file.
        configs: of each cell, by id.
        lanes: most cells in a pack; None: what suits the device and the model.
    """
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(together_key(configs[cell.id]), []).append(cell)
    packs: list[list[Cell]] = []
    for group in groups.values():
        size = lanes or suitable_lanes(configs[group[0].id])
        ordered = sorted(group, key=lambda cell: cell.seed)  # stable: file order within a seed
        num_packs = -(-len(ordered) // size)
        cuts = [len(ordered) * i // num_packs for i in range(num_packs + 1)]
        for start, end in pairwise(cuts):
            packs.append(ordered[start:end])
    return packs


def begun_first(packs: Sequence[list[Cell]], begun: Callable[[Cell], bool]) -> list[list[Cell]]:
    """Return the packs, those first that hold a cell that has begun."""
    return sorted(packs, key=lambda pack: not any(map(begun, pack)))


def suitable_lanes(config: Config) -> int:
    """Return how many runs go well side by side on the configured device."""
    if pick_device(config.engine.device).type == "cpu":
        return CPU_LANES
    if config.model.name:
        return min(GPU_LANES.values())
    return GPU_LANES.get(config.data.name, GPU_LANES_SMALL)
