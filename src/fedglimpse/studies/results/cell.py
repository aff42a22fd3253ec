"""The vocabulary of a study: settings, variants, seeds, and what came of each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedglimpse.studies.results.trace import Trace
from fedglimpse.studies.statistics.condense import Facts
from fedglimpse.studies.statistics.fairness import Participation

State = Literal["finished", "unfinished", "failed", "missing"]


@dataclass(frozen=True)
class Cell:
    """One seed of one variant (a method and its options) in one setting."""

    id: str
    setting: str
    variant: str
    seed: int
    state: State
    reason: str = ""  # why it failed
    config: Mapping[str, Any] = field(default_factory=dict)  # every dotted key, as it was run
    facts: Facts | None = None  # None where nothing was recorded
    participation: Participation | None = None
    trace: Trace | None = None  # kept for the first seed of every variant
    theory: Mapping[str, Any] | None = None  # series and figures of theory.json, if there is one
    environment: Mapping[str, Any] = field(default_factory=dict)


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
    cells: Sequence[Cell]
    partitions: Sequence[Partition] = ()
    source: str = ""  # where it was read from

    @property
    def settings(self) -> list[str]:
        """Names of the settings, in the order of the cells."""
        return _unique(c.setting for c in self.cells)

    @property
    def variants(self) -> list[str]:
        """Names of the variants, in the order of the cells."""
        return _unique(c.variant for c in self.cells)

    def of(self, setting: str, variant: str) -> list[Cell]:
        """Return the seeds of one variant in one setting."""
        return [c for c in self.cells if (c.setting, c.variant) == (setting, variant)]

    def count(self, state: State) -> int:
        """Return how many cells are in this state."""
        return sum(c.state == state for c in self.cells)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
