"""Who takes part: how evenly clients are chosen, and which classes a round gets to see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True)
class Participation:
    """How often every client of one run was seen and chosen."""

    seen: tuple[int, ...]  # [N] rounds in which it was visible
    chosen: tuple[int, ...]  # [N] rounds in which its update was used
    classes_covered: float | None  # mean over rounds: share of classes held by the chosen

    @property
    def jain(self) -> float:
        """Jain's index of the choices: 1 if all clients were chosen equally often, 1/N if one."""
        return jain(self.chosen)

    @property
    def jain_of_seen(self) -> float:
        """Jain's index of visibility: the method cannot choose whom it never sees."""
        return jain(self.seen)

    @property
    def visits(self) -> tuple[int, float, int]:
        """Fewest, median and most times that a client was chosen."""
        return min(self.chosen), median(self.chosen), max(self.chosen)

    @property
    def never(self) -> int:
        """How many clients were seen but never chosen."""
        return sum(1 for s, c in zip(self.seen, self.chosen, strict=True) if s and not c)


def jain(counts: Sequence[float]) -> float:
    """Return (sum x)^2 / (N sum x^2); 1 where nobody was chosen, for nobody was favoured."""
    squares = sum(x * x for x in counts)
    return sum(counts) ** 2 / (len(counts) * squares) if squares else 1.0


def classes_covered(
    selected: Sequence[Sequence[int]], histograms: Sequence[Sequence[int]]
) -> float | None:
    """Return the mean share of classes that the chosen of a round hold; None without rounds.

    Args:
        selected: ids of the chosen, one entry for each round; rounds without any do not count.
        histograms: examples of each class that every client holds.  # [N, C]
    """
    held = [{c for c, count in enumerate(row) if count} for row in histograms]
    rounds = [set().union(*(held[i] for i in ids)) for ids in selected if ids]
    return fmean(len(r) for r in rounds) / len(histograms[0]) if rounds else None
