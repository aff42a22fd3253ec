"""The vocabulary of a study: settings, variants, seeds, and the result of each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedglimpse.errors import UserError
from fedglimpse.runs.folder import run_identity
from fedglimpse.runs.provenance import draws_of
from fedglimpse.studies.results.trace import RunTrace
from fedglimpse.studies.statistics.condense import Facts
from fedglimpse.studies.statistics.participation import Participation

CellState = Literal["finished", "unfinished", "failed", "missing"]
CellName = tuple[str, str, int]  # setting, variant, seed


@dataclass(frozen=True)
class CellResult:
    """The result of one seed of one variant (a method and its options) in one setting."""

    id: str
    setting: str
    variant: str
    seed: int
    state: CellState
    reason: str = ""  # why it failed
    config: Mapping[str, Any] = field(default_factory=dict)  # every dotted key, as it was run
    facts: Facts | None = None  # None if nothing was recorded
    participation: Participation | None = None
    trace: RunTrace | None = None  # stored for the first seed of every variant
    theory: Mapping[str, Any] | None = None  # series and figures of theory.json, if there is one
    environment: Mapping[str, Any] = field(default_factory=dict)
    latecomers: Mapping[str, Any] | None = None  # of summary.json; None: nobody came late

    @property
    def name(self) -> CellName:
        """What identifies the cell within its study."""
        return self.setting, self.variant, self.seed

    @property
    def rounds_run(self) -> int:
        """How many rounds are recorded."""
        return 0 if self.facts is None else self.facts.climb.played


@dataclass(frozen=True)
class Partition:
    """How many examples of each class every client holds."""

    setting: str
    seed: int
    counts: Sequence[Sequence[int]]  # [N, C]


@dataclass(frozen=True)
class Study:
    """Cells that belong together, and what they are meant to show."""

    title: str
    claim: str
    control: str | None
    targets: Mapping[str, float]  # setting -> accuracy, 0 to 1
    paper: Mapping[str, Any] | None  # published figures, as a paper_*.toml holds them
    cells: Sequence[CellResult]
    partitions: Sequence[Partition] = ()
    source: str = ""  # where it was read from

    @property
    def settings(self) -> list[str]:
        """Names of the settings, in the order of the cells."""
        return list(dict.fromkeys(cell.setting for cell in self.cells))

    @property
    def variants(self) -> list[str]:
        """Names of the variants, in the order of the cells."""
        return list(dict.fromkeys(cell.variant for cell in self.cells))

    @property
    def seeds(self) -> list[int]:
        """The different seeds, in rising order."""
        return sorted({cell.seed for cell in self.cells})

    def of(self, setting: str, variant: str) -> list[CellResult]:
        """Return the seeds of one variant in one setting."""
        cells: list[CellResult] = []
        for cell in self.cells:
            if cell.setting == setting and cell.variant == variant:
                cells.append(cell)
        return cells

    def count(self, state: CellState) -> int:
        """Return how many cells are in this state."""
        return sum(cell.state == state for cell in self.cells)


def join_studies(studies: Sequence[Study], source: str) -> Study:
    """Join studies that hold different cells of one study, such as those run on two machines.

    Of a cell that several of them hold, the one that got furthest is taken.

    Args:
        studies: at least one; they must have the same title.
        source: where they were read from.

    Raises:
        UserError: for different studies, or for different runs with the same name.
    """
    first = studies[0]
    cells: dict[CellName, CellResult] = {}
    partitions: dict[tuple[str, int], Partition] = {}
    for study in studies:
        if study.title != first.title:
            raise UserError(
                f"{source} holds different studies ('{first.title}' and '{study.title}'): keep "
                "each study in a folder of its own."
            )
        for cell in study.cells:
            previous = cells.get(cell.name)
            if previous is not None:
                _check_same_run(previous, cell, source)
            if previous is None or _progress(cell) > _progress(previous):
                cells[cell.name] = cell  # an existing name keeps its position
        for partition in study.partitions:
            partitions[partition.setting, partition.seed] = partition
    return dataclasses.replace(
        first,
        cells=list(cells.values()),
        partitions=list(partitions.values()),
        source=source,
    )


def _check_same_run(cell: CellResult, other: CellResult, source: str) -> None:
    """Raise UserError if two cells with one name were not run alike: neither may hide the other."""
    if not cell.config or not other.config:
        return
    if _identity(cell) != _identity(other):
        raise UserError(
            f"{source} holds different runs of setting '{cell.setting}', variant "
            f"'{cell.variant}', seed {cell.seed}: keep each study in a folder of its own."
        )


def _identity(cell: CellResult) -> str:
    return run_identity(cell.config, draws_of(cell.environment))


def _progress(cell: CellResult) -> tuple[bool, int, bool]:
    return cell.state == "finished", cell.rounds_run, cell.state == "failed"
