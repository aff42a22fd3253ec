"""Which cells of a sweep run side by side.

Packs are made once and stored in sweep.json, because who else shares a pass may change the last
bits of a sum: a sweep that is resumed, with other options or on another machine, runs the same
cells together. They do not depend on what is done already, nor on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from fedglimpse.config.schema import Config
from fedglimpse.runs.build import device_of, together_key
from fedglimpse.runs.threads import available_cores
from fedglimpse.studies.sweep.plan import Cell

# On one core, lanes pay for dense models (`benchmarks/threads.py`): with four of them a round and
# lane takes half to five sixths of its time alone; sixteen save little more, or take longer.
# Convolutions train one client after the other, so lanes save nothing.
CPU_LANES = 4
CONVOLUTIONAL = ("cifar10", "fashion")
GPU_LANES = {"cifar10": 16, "fashion": 24}  # enough clients at once to fill one large GPU
GPU_LANES_SMALL = 48  # models without convolutions

Configs = Mapping[str, Config]  # by id of the cell


def most_on_cpu(num_cells: int, shards: int) -> int:
    """Return how many cells a pack may hold on a CPU so that there is a pack for every core.

    Args:
        num_cells: of the whole plan, so that a part of it that runs first is packed alike.
        shards: how many commands share the sweep, each on a machine like this one.
    """
    return min(max(num_cells // (available_cores() * shards), 1), CPU_LANES)


def fixed_packs(
    stored: Sequence[Sequence[str]],
    cells: Sequence[Cell],
    configs: Configs,
    lanes: int | None,
    most_on_cpu: int = CPU_LANES,
) -> list[list[Cell]]:
    """Return the packs of cells: those that are stored, then new ones of all other cells.

    Args:
        stored: packs of ids; cells that are not among `cells` are left out.
        cells: to be run.
        configs: of each cell, by id.
        lanes: most cells in a new pack; None: what suits the device and the model.
        most_on_cpu: most cells in a new pack on a CPU, unless `lanes` says otherwise.
    """
    unpacked = {cell.id: cell for cell in cells}
    packs: list[list[Cell]] = []
    for ids in stored:
        pack = [unpacked.pop(name) for name in ids if name in unpacked]
        if pack:
            packs.append(pack)
    return packs + make_packs(list(unpacked.values()), configs, lanes, most_on_cpu)


def make_packs(
    cells: Sequence[Cell], configs: Configs, lanes: int | None, most_on_cpu: int = CPU_LANES
) -> list[list[Cell]]:
    """Group cells that can share a world, at most `lanes` at a time, of about equal size.

    First seeds come first, so that a sweep that is cut short holds whole comparisons.

    Args:
        cells: in the order of the file.
        configs: of each cell, by id.
        lanes: most cells in a pack; None: what suits the device and the model.
        most_on_cpu: most cells in a pack on a CPU, unless `lanes` says otherwise.
    """
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(together_key(configs[cell.id]), []).append(cell)
    packs: list[list[Cell]] = []
    for group in groups.values():
        size = lanes or suitable_lanes(configs[group[0].id], most_on_cpu)
        ordered = sorted(group, key=lambda cell: cell.seed)  # stable: file order within a seed
        num_packs = math.ceil(len(ordered) / size)
        cuts = [len(ordered) * i // num_packs for i in range(num_packs + 1)]
        for start, end in pairwise(cuts):
            packs.append(ordered[start:end])
    return packs


def begun_first(packs: Sequence[list[Cell]], begun: Callable[[Cell], bool]) -> list[list[Cell]]:
    """Return the packs, those first that hold a cell that has begun."""
    return sorted(packs, key=lambda pack: not any(map(begun, pack)))


def suitable_lanes(config: Config, most_on_cpu: int = CPU_LANES) -> int:
    """Return how many runs go well side by side on the configured device."""
    if device_of(config).type == "cpu":
        model = config.model.name or config.data.name
        return 1 if model in CONVOLUTIONAL else most_on_cpu
    if config.model.name:
        return min(GPU_LANES.values())
    return GPU_LANES.get(config.data.name, GPU_LANES_SMALL)
