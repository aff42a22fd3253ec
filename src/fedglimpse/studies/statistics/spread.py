"""Two kinds of spread that must not be mixed: over seeds, and over the last rounds of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from fedglimpse.runs.summary import Estimate


@dataclass(frozen=True)
class Spread:
    """Final accuracy of one method in one setting.

    `over_seeds` says how much another seed (partition, visibility, initial model) would change
    the result. `over_rounds` says how much the model of one run swings from round to round.
    """

    values: tuple[float, ...]  # one for each seed: the mean over its last rounds
    over_seeds: Estimate  # mean, standard deviation and t interval of `values`
    over_rounds: float | None  # mean over seeds of each run's standard deviation over rounds

    @staticmethod
    def of(values: Sequence[float], over_rounds: Sequence[float | None]) -> Spread:
        """Describe one value for each seed, and each seed's deviation over its last rounds."""
        known = [s for s in over_rounds if s is not None]
        return Spread(tuple(values), Estimate.of(values), mean(known) if known else None)

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return self.over_seeds.mean

    @property
    def std(self) -> float | None:
        """Standard deviation over seeds; None for a single seed."""
        return self.over_seeds.std

    @property
    def seeds(self) -> int:
        """How many seeds there are."""
        return len(self.values)
