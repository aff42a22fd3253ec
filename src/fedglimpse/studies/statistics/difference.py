"""Is a difference real? Paired by seed against a control, or unpaired against published figures.

Two methods run with the same seed share partition, visibility and initial model, so differences
are taken seed by seed. Two looks at them are reported:

- the **bootstrap 95 % interval** of their mean. With few seeds it is too narrow: it cannot leave
  the range of the seeds that were run, and from normal differences it covers the true mean as
  rarely as `COVERAGE` says (`tests/stats` measures it);
- the **paired t-test**, which does pay for few seeds, but trusts that differences are roughly
  normal, which 3 to 5 of them can never show. Where all differences are the same there is no
  spread for it to go by, and the **sign test** takes its place: p = 2^(1-n), so that fewer than
  6 pairs are never called real for agreeing, which accuracies of few test examples often do.

A difference is called real only where both agree, after Holm's correction of the p-values. Where
the interval holds zero it is within noise; where it does not and the test is not sure, nothing can
be told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev
from typing import TypeVar

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.runs.summary import half_width, p_of_zero

LEVEL = 0.05  # chance of calling noise real, over all comparisons of a family together
RESAMPLES = 20_000
COVERAGE = {2: 0.50, 3: 0.75, 5: 0.84, 8: 0.89}  # pairs -> share of intervals with the true mean
SAME = 1e-9  # spread below which differences are the same, up to rounding
ENUMERATED = 6  # up to so many seeds all n^n resamples are listed: no draw, no seed
Key = TypeVar("Key", int, tuple[int, int])  # a seed, or a place in a list of settings and a seed


@dataclass(frozen=True)
class Difference:
    """Mean difference, its 95 % interval and the p-value of no difference."""

    mean: float
    low: float | None  # None where one pair of seeds is all there is
    high: float | None
    p: float | None  # before any correction
    pairs: int  # seeds that both sides have

    def verdict(self, adjusted_p: float | None) -> str:
        """Return "real", "within noise" or, as with fewer than two pairs, "cannot tell"."""
        if adjusted_p is None or self.low is None or self.high is None:
            return "cannot tell"
        if self.low <= 0 <= self.high:
            return "within noise"
        return "real" if adjusted_p < LEVEL else "cannot tell"


def paired(ours: Mapping[Key, float], control: Mapping[Key, float]) -> Difference | None:
    """Compare two methods on the seeds that both have run; None where there is none.

    Args:
        ours: seed -> value; where several settings are pooled, (setting's place, seed) -> value.
        control: the same of the other method.
    """
    differences = [ours[s] - control[s] for s in sorted(ours) if s in control]
    if not differences:
        return None
    if len(differences) == 1:
        return Difference(differences[0], None, None, None, 1)
    low, high = bootstrap_interval(differences)
    return Difference(mean(differences), low, high, _p_of_zero(differences), len(differences))


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the mean.

    Few values are resampled in all n^n ways; more by draws that depend on nothing but n.
    """
    rows = torch.tensor(values, dtype=torch.float64)
    means = rows[_resamples(len(values))].mean(dim=1)
    low = torch.quantile(means, 0.025, interpolation="lower")
    high = torch.quantile(means, 0.975, interpolation="higher")
    return float(low), float(high)


@cache
def _resamples(n: int) -> Tensor:
    """Return positions `[B, n]` of the bootstrap samples."""
    if n <= ENUMERATED:
        return torch.cartesian_prod(*[torch.arange(n)] * n)
    return torch.randint(n, (RESAMPLES, n), generator=rng.generator(0, "bootstrap", n))


def _p_of_zero(differences: Sequence[float]) -> float:
    """Return the p-value of the two-sided paired t-test; of the sign test where all are the same.

    The sign test asks how often n differences would agree in sign if either sign were as likely.
    """
    n, middle, spread = len(differences), mean(differences), stdev(differences)
    if spread <= SAME * max(1.0, abs(middle)):
        return 1.0 if abs(middle) <= SAME else 2.0 ** (1 - n)
    return p_of_zero(middle, spread / math.sqrt(n), n - 1)


@dataclass(frozen=True)
class Published:
    """A figure of the paper: mean and standard deviation over seeds."""

    mean: float
    std: float
    seeds: int


def against_published(ours: Sequence[float], theirs: Published) -> Difference:
    """Compare our seeds with a published figure by Welch's t-test, which pairs nothing.

    The interval is Welch's, because nothing of the published runs can be resampled. Where neither
    side has a spread, or one has a single seed, nothing says what noise is: it cannot be told.
    """
    n, gap = len(ours), mean(ours) - theirs.mean
    if n < 2 or theirs.seeds < 2:
        return Difference(gap, None, None, None, n)
    ours_error, their_error = stdev(ours) ** 2 / n, theirs.std**2 / theirs.seeds
    error = ours_error + their_error
    if error <= SAME**2:
        return Difference(gap, None, None, None, n)
    freedom = error**2 / (ours_error**2 / (n - 1) + their_error**2 / (theirs.seeds - 1))
    width = half_width(math.sqrt(error), freedom)
    p = p_of_zero(gap, math.sqrt(error), freedom)
    return Difference(gap, gap - width, gap + width, p, n)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted by Holm's step-down rule; None stays None and does not count.

    Comparing many cells finds "real" differences by luck. After this correction the chance of
    even one false one among all of them is at most the level.
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - rank)))
        adjusted[i] = largest
    return adjusted
