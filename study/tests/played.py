"""Studies whose every cell came out as a test wants it, on the real grids of plans/."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedglimpse.runs.summary import COSTS
from fedglimpse.studies.results.study import CellResult, Study
from fedglimpse.studies.statistics.condense import Climb, Curve, Facts
from reproduction.shelf import Shelf

ROOT = Path(__file__).parents[1]
PLANS = Shelf(ROOT)
BASELINES = ("fedprox", "ha-edgeflow", "fedawac", "f3ast")
ROUNDS = 600
PATTERN = (1, -1, 1, -1, 0)  # of seeds that disagree


@dataclass(frozen=True)
class Came:
    """How one run came out."""

    accuracy: float
    swing: float = 0.02
    rounds: int = 300  # until the target
    reached: bool = True


World = Callable[[CellResult, Mapping[str, Any]], Came | None]  # None: the cell was not run


def jitter(cell: CellResult, size: float = 0.001) -> float:
    """Return a small number that differs from seed to seed and from variant to variant."""
    turn = sum(map(ord, cell.variant + cell.setting)) * (2 * cell.seed + 3)
    return size * ((turn % 11) / 5 - 1)


def disagree(cell: CellResult) -> int:
    """Return -1, 0 or 1: seeds of a variant disagree, and no variant has the better ones."""
    shift = sum(map(ord, cell.variant + cell.setting))
    return PATTERN[(cell.seed + shift) % len(PATTERN)]


@cache
def planned(name: str) -> Study:
    """Return a planned study of which nothing has run."""
    study = PLANS.study(name).study
    cells = [
        dataclasses.replace(c, state="missing", facts=None, environment={}) for c in study.cells
    ]
    return dataclasses.replace(study, cells=cells)


def played(name: str, world: World) -> Study:
    """Return a planned study whose cells ended as `world` says."""
    study = planned(name)
    return dataclasses.replace(study, cells=[_play(cell, world) for cell in study.cells])


def _play(cell: CellResult, world: World) -> CellResult:
    came = world(cell, cell.config)
    if came is None:
        return cell
    return dataclasses.replace(cell, state="finished", facts=_facts(came))


def _facts(came: Came) -> Facts:
    ends = (came.accuracy / 2, came.accuracy)
    at = dict.fromkeys(COSTS, (came.rounds * 1000,))
    return Facts(
        accuracy=came.accuracy,
        macro_f1=came.accuracy,
        reward=came.accuracy,
        over_rounds=came.swing,
        best=came.accuracy,
        rejected=0,
        seconds=1.0,
        curve=Curve((1, ROUNDS), ends, ends, dict.fromkeys(COSTS, (0, 0))),
        climb=Climb(
            rounds=(came.rounds,),
            heights=(1.0 if came.reached else 0.0,),
            costs=at,
            played=ROUNDS,
            totals=dict.fromkeys(COSTS, ROUNDS * 1000),
        ),
    )
