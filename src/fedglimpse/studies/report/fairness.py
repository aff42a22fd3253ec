"""Participation over the seeds of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from fedglimpse.studies.results import Cell


@dataclass(frozen=True)
class Fairness:
    """Means over seeds; fewest and most visits are the extremes of all seeds."""

    jain: float
    jain_of_seen: float
    fewest: int
    median: float
    most: int
    never: float  # clients seen but never chosen, mean over seeds
    classes_covered: float | None  # share of classes held by the chosen of a round

    @staticmethod
    def of(cells: Sequence[Cell]) -> Fairness | None:
        """Put the seeds of a row together; None where nothing was recorded."""
        parts = [c.participation for c in cells if c.participation is not None]
        if not parts:
            return None
        covered = [p.classes_covered for p in parts if p.classes_covered is not None]
        return Fairness(
            jain=mean(p.jain for p in parts),
            jain_of_seen=mean(p.jain_of_seen for p in parts),
            fewest=min(p.visits[0] for p in parts),
            median=mean(p.visits[1] for p in parts),
            most=max(p.visits[2] for p in parts),
            never=mean(p.never for p in parts),
            classes_covered=mean(covered) if covered else None,
        )
