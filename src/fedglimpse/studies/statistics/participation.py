"""Who takes part: how evenly clients are chosen, and which classes a round's clients hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, mean, median


@dataclass(frozen=True)
class Participation:
    """How often every client of one run was visible and chosen."""

    seen: tuple[int, ...]  # [N] rounds in which it was visible
    chosen: tuple[int, ...]  # [N] rounds in which its update was used
    classes_covered: float | None  # mean over rounds: share of classes held by the chosen

    @property
    def jain(self) -> float:
        """Jain's index of the choices: 1 if all clients were chosen equally often, 1/N if one."""
        return jain(self.chosen)

    @property
    def jain_of_seen(self) -> float:
        """Jain's index of visibility, which no method can change."""
        return jain(self.seen)

    @property
    def visits(self) -> tuple[int, float, int]:
        """Fewest, median and most times that a client was chosen."""
        return min(self.chosen), median(self.chosen), max(self.chosen)

    @property
    def never(self) -> int:
        """How many clients were visible at least once but never chosen."""
        counts = zip(self.seen, self.chosen, strict=True)
        return sum(seen > 0 and chosen == 0 for seen, chosen in counts)


@dataclass(frozen=True)
class Fairness:
    """Participation over seeds: means, and for visits the extremes of all seeds."""

    jain: float
    jain_of_seen: float
    fewest: int
    median: float
    most: int
    never: float  # clients seen but never chosen, mean over seeds
    classes_covered: float | None  # share of classes held by the chosen of a round

    @staticmethod
    def of(seeds: Sequence[Participation]) -> Fairness | None:
        """Combine the seeds of one method in one setting; None if nothing was recorded."""
        if not seeds:
            return None
        jain_indices: list[float] = []
        jain_of_seen: list[float] = []
        fewest: list[int] = []
        medians: list[float] = []
        most: list[int] = []
        never: list[int] = []
        covered: list[float] = []
        for seed in seeds:
            seed_fewest, seed_median, seed_most = seed.visits
            jain_indices.append(seed.jain)
            jain_of_seen.append(seed.jain_of_seen)
            fewest.append(seed_fewest)
            medians.append(seed_median)
            most.append(seed_most)
            never.append(seed.never)
            if seed.classes_covered is not None:
                covered.append(seed.classes_covered)
        return Fairness(
            jain=mean(jain_indices),
            jain_of_seen=mean(jain_of_seen),
            fewest=min(fewest),
            median=mean(medians),
            most=max(most),
            never=mean(never),
            classes_covered=mean(covered) if covered else None,
        )


def jain(counts: Sequence[float]) -> float:
    """Return (sum x)^2 / (N sum x^2); 1 if nobody was chosen, because nobody was favoured."""
    squares = sum(count * count for count in counts)
    if not squares:
        return 1.0
    return sum(counts) ** 2 / (len(counts) * squares)


def classes_covered(
    selected: Sequence[Sequence[int]],
    histograms: Sequence[Sequence[int]],
) -> float | None:
    """Return the mean share of classes that the chosen clients of a round hold.

    Args:
        selected: ids of the chosen, one entry for each round; rounds without any do not count.
        histograms: examples of each class that every client holds.  # [N, C]

    Returns:
        None if no client was chosen in any round.
    """
    num_covered: list[int] = []
    classes = range(len(histograms[0]))
    for ids in selected:
        if ids:
            covered = [label for label in classes if any(histograms[i][label] for i in ids)]
            num_covered.append(len(covered))
    return fmean(num_covered) / len(classes) if num_covered else None
