"""The cost of reaching a target accuracy, where some runs never reached it.

A run that ended before the target is **right-censored**: its cost is unknown, only that it is more
than what it had spent. Such a run is never dropped (that would reward methods that fail on hard
seeds) and never counted as if it had reached the target at its last round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median


@dataclass(frozen=True)
class Spent:
    """What one run had spent when it reached the target, or when it ended without reaching it."""

    amount: float
    reached: bool


@dataclass(frozen=True)
class ToTarget:
    """The cost of a target over seeds."""

    runs: tuple[Spent, ...]

    @property
    def amounts(self) -> list[float]:
        """What every run spent, whether it reached the target or not."""
        return [run.amount for run in self.runs]

    @property
    def reached(self) -> int:
        """How many runs reached the target."""
        return sum(run.reached for run in self.runs)

    @property
    def exact(self) -> bool:
        """True if every run reached the target, so that the mean is known."""
        return self.reached == len(self.runs)

    @property
    def at_least(self) -> float:
        """The mean over runs if `exact`, else a lower bound: misses count what they spent."""
        return mean(self.amounts)

    @property
    def range(self) -> tuple[float, float] | None:
        """The cheapest and the most expensive run; None if a run missed the target.

        Costs are skewed, so a symmetric interval around their mean would say too much.
        """
        if not self.exact:
            return None
        return min(self.amounts), max(self.amounts)

    @property
    def median(self) -> float | None:
        """The median over runs, or None if misses leave it open.

        It is known if all runs it depends on reached the target and every miss spent no less.
        """
        reached: list[float] = []
        missed: list[float] = []
        for run in self.runs:
            (reached if run.reached else missed).append(run.amount)
        needed = len(self.runs) // 2 + 1  # runs up to and including the upper middle one
        settled = sorted(reached)[:needed]
        if len(settled) < needed:
            return None
        if missed and min(missed) < settled[-1]:
            return None
        return median(self.amounts)


# Bounds of a saving. A bound from below on a saving is one from above on the extra cost.
EXACT = "="
AT_LEAST = "≥"
AT_MOST = "≤"
UNKNOWN = "?"  # both sides have misses
QUALIFIERS = {EXACT: "", AT_LEAST: "at least ", AT_MOST: "at most "}
REVERSED = {EXACT: EXACT, AT_LEAST: AT_MOST, AT_MOST: AT_LEAST}


@dataclass(frozen=True)
class Saving:
    """Share of the control's cost that a method saves; negative where it costs more."""

    share: float
    bound: str  # EXACT, AT_LEAST, AT_MOST or UNKNOWN

    def text(self) -> str:
        """Return `saves 27 %`, `saves at least 27 %`, `costs 40 % more` or `inconclusive`."""
        if self.bound == UNKNOWN:
            return "inconclusive"
        if self.share >= 0:
            return f"saves {QUALIFIERS[self.bound]}{100 * self.share:.0f} %"
        qualifier = QUALIFIERS[REVERSED[self.bound]]
        if self.share > -1:
            return f"costs {qualifier}{-100 * self.share:.0f} % more"
        times = 1 - self.share
        digits = 0 if times >= 10 else 1
        return f"costs {qualifier}{times:.{digits}f} times as much"


def saving(runs: Sequence[Spent], control: Sequence[Spent]) -> Saving | None:
    """Compare total costs of the same seeds, in the same order; None if the control's is zero.

    A total with a miss in it is a lower bound. The saving is then known on one side only, and not
    at all if both totals are bounds.
    """
    cost = ToTarget(tuple(runs))
    control_cost = ToTarget(tuple(control))
    control_total = sum(control_cost.amounts)
    if not control_total:
        return None
    share = 1 - sum(cost.amounts) / control_total
    bounds = {
        (True, True): EXACT,
        (True, False): AT_LEAST,
        (False, True): AT_MOST,
        (False, False): UNKNOWN,
    }
    return Saving(share, bounds[cost.exact, control_cost.exact])
