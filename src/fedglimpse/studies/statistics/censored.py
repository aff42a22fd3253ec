"""What it took to reach a target accuracy, where some runs never did.

A run that ended before the target is **right-censored**: its cost is not known, only that it is
more than what it had spent. Such a run is never dropped (that would reward methods that fail on
hard seeds) and never counted as if it had arrived at its last round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median


@dataclass(frozen=True)
class Spent:
    """One run: what it had spent when it reached the target, or when it ended without."""

    amount: float
    reached: bool


@dataclass(frozen=True)
class ToTarget:
    """The cost of a target over seeds."""

    runs: tuple[Spent, ...]

    @property
    def reached(self) -> int:
        """How many runs got there."""
        return sum(run.reached for run in self.runs)

    @property
    def exact(self) -> bool:
        """True where every run got there, so that the mean is known."""
        return self.reached == len(self.runs)

    @property
    def at_least(self) -> float:
        """The mean over runs if `exact`; else a lower bound of it: misses count what they spent."""
        return mean(run.amount for run in self.runs)

    @property
    def range(self) -> tuple[float, float] | None:
        """The cheapest and the dearest run; None where a miss leaves the dearest open.

        Costs are skewed, so a symmetric interval around their mean would say too much.
        """
        amounts = [run.amount for run in self.runs]
        return (min(amounts), max(amounts)) if self.exact else None

    @property
    def median(self) -> float | None:
        """The median over runs, or None where misses leave it open.

        It is known as long as all runs it depends on got there and every miss spent no less.
        """
        middle = median(run.amount for run in self.runs)
        first_miss = min((run.amount for run in self.runs if not run.reached), default=None)
        needed = len(self.runs) // 2 + 1  # runs up to and including the upper middle one
        settled = sorted(run.amount for run in self.runs if run.reached)[:needed]
        if len(settled) < needed or (first_miss is not None and first_miss < settled[-1]):
            return None
        return middle


@dataclass(frozen=True)
class Saving:
    """Share of the control's cost that a method saves; negative where it costs more."""

    share: float
    bound: str  # "=", "≥" (at least so much), "≤" (at most), or "?" where both have misses

    def text(self) -> str:
        """Return `saves 27 %`, `saves at least 27 %`, `costs 40 % more`, or `cannot tell`."""
        if self.bound == "?":
            return "cannot tell"
        saves = self.share >= 0
        turned = {"=": "=", "≥": "≤", "≤": "≥"}  # at least as a saving is at most as a cost
        sign = self.bound if saves else turned[self.bound]
        least = {"=": "", "≥": "at least ", "≤": "at most "}[sign]
        if saves:
            return f"saves {least}{100 * self.share:.0f} %"
        if self.share > -1:
            return f"costs {least}{-100 * self.share:.0f} % more"
        times = 1 - self.share
        return f"costs {least}{times:.{0 if times >= 10 else 1}f} times as much"


def saving(ours: Sequence[Spent], control: Sequence[Spent]) -> Saving | None:
    """Compare total costs of the same seeds, in the same order; None where control's is zero.

    A total with a miss in it is a lower bound: the saving is then known on one side only, and not
    at all where both totals are bounds.
    """
    mine, theirs = sum(r.amount for r in ours), sum(r.amount for r in control)
    if not theirs:
        return None
    missed, control_missed = (any(not r.reached for r in runs) for runs in (ours, control))
    bound = {(False, False): "=", (False, True): "≥", (True, False): "≤", (True, True): "?"}
    return Saving(1 - mine / theirs, bound[missed, control_missed])
