"""Spread over seeds, and whether a difference between two methods is significant.

Two methods run with the same seed share partition, visibility and initial model, so differences
are taken seed by seed. Three things are computed from these paired differences:

- the **t interval** of their mean (95 %), which tables show;
- the **paired t-test**, which pays for few seeds but assumes that differences are roughly normal,
  which 3 to 5 of them can never show. Where all differences are the same, there is no spread to
  test against, and the **sign test** is used instead: p = 2^(1-n). So fewer than 6 pairs are never
  significant for agreeing exactly, which accuracies on few test examples often do;
- the **bootstrap interval** of their mean (95 %). With few seeds it is too narrow, because it
  cannot leave the range of the seeds that were run: from normal differences it covers the true
  mean only as often as `COVERAGE` says (`tests/studies/stats` measures it).

A difference is significant only if the bootstrap interval excludes zero and the p-value stays
below 0.05 after Holm's correction. If the bootstrap interval contains zero it is not significant;
if only the test fails, the result is inconclusive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import mean, stdev
from typing import TypeVar

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.runs.summary import Estimate, half_width, p_of_zero

LEVEL = 0.05  # chance of calling noise significant, over all comparisons of a family together
RESAMPLES = 20_000
COVERAGE = {2: 0.50, 3: 0.75, 5: 0.84, 8: 0.89}  # pairs -> share of intervals with the true mean
SAME = 1e-9  # a spread below this is rounding: the differences are the same
ENUMERATED = 6  # with at most this many seeds all n^n resamples are listed, so nothing is random

SIGNIFICANT = "significant"
NOT_SIGNIFICANT = "not significant"
INCONCLUSIVE = "inconclusive"

Key = TypeVar("Key", int, tuple[int, int])  # a seed, or (position of a setting, seed)


@dataclass(frozen=True)
class Spread:
    """Final accuracy of one method in one setting, with two spreads that must not be mixed.

    `over_seeds` says how much another seed (partition, visibility, initial model) would change
    the result. `over_rounds` says how much the model of one run varies from round to round.
    """

    values: tuple[float, ...]  # one for each seed: the mean over its last rounds
    over_seeds: Estimate  # mean, standard deviation and t interval of `values`
    over_rounds: float | None  # mean over seeds of each run's standard deviation over rounds

    @staticmethod
    def of(values: Sequence[float], over_rounds: Sequence[float | None]) -> Spread:
        """Describe one value for each seed, and each seed's deviation over its last rounds."""
        deviations = [deviation for deviation in over_rounds if deviation is not None]
        mean_deviation = mean(deviations) if deviations else None
        return Spread(tuple(values), Estimate.of(values), mean_deviation)

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
        """Number of seeds."""
        return len(self.values)


@dataclass(frozen=True)
class Difference:
    """A mean difference, the interval and p-value that decide about it, and its t interval."""

    mean: float
    low: float | None  # None if there is only one pair of seeds
    high: float | None
    p: float | None  # before any correction
    pairs: int  # seeds that both sides have
    t_half_width: float | None = field(default=None, kw_only=True)  # half of the 95 % t interval

    def verdict(self, adjusted_p: float | None) -> str:
        """Return SIGNIFICANT, NOT_SIGNIFICANT or, as with fewer than two pairs, INCONCLUSIVE."""
        if adjusted_p is None or self.low is None or self.high is None:
            return INCONCLUSIVE
        if self.low <= 0 <= self.high:
            return NOT_SIGNIFICANT
        return SIGNIFICANT if adjusted_p < LEVEL else INCONCLUSIVE

    @property
    def t_interval(self) -> tuple[float, float] | None:
        """Ends of the 95 % t interval; None where there is none."""
        if self.t_half_width is None:
            return None
        return self.mean - self.t_half_width, self.mean + self.t_half_width


def paired(values: Mapping[Key, float], control: Mapping[Key, float]) -> Difference | None:
    """Compare two methods on the seeds that both have run; None if there is no such seed.

    Args:
        values: seed -> value; if several settings are pooled, (position of setting, seed) -> value.
        control: the same of the other method.
    """
    differences: list[float] = []
    for seed in sorted(values):
        if seed in control:
            differences.append(values[seed] - control[seed])
    if not differences:
        return None
    if len(differences) == 1:
        return Difference(differences[0], None, None, None, 1)
    low, high = bootstrap_interval(differences)
    return Difference(
        mean=mean(differences),
        low=low,
        high=high,
        p=_p_of_zero(differences),
        pairs=len(differences),
        t_half_width=Estimate.of(differences).half_width,
    )


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
        positions = torch.arange(n)
        return torch.cartesian_prod(*[positions] * n)
    draw = rng.generator(0, "bootstrap", n)
    return torch.randint(n, (RESAMPLES, n), generator=draw)


def _p_of_zero(differences: Sequence[float]) -> float:
    """Return the p-value of the two-sided paired t-test, or of the sign test if all are the same.

    The sign test asks how often n differences would agree in sign if either sign were as likely.
    """
    n = len(differences)
    mean_difference = mean(differences)
    spread = stdev(differences)
    if spread <= SAME * max(1.0, abs(mean_difference)):
        return 1.0 if abs(mean_difference) <= SAME else 2.0 ** (1 - n)
    return p_of_zero(mean_difference, spread / math.sqrt(n), n - 1)


@dataclass(frozen=True)
class Published:
    """A figure of the paper: mean and standard deviation over seeds."""

    mean: float
    std: float
    seeds: int


def against_published(values: Sequence[float], figure: Published) -> Difference:
    """Compare values of our seeds with a published figure by Welch's t-test, which pairs nothing.

    The interval is Welch's, because nothing of the published runs can be resampled. Where neither
    side has a spread, or one has a single seed, there is no estimate of the noise and so neither
    interval nor p-value.
    """
    n = len(values)
    gap = mean(values) - figure.mean
    if n < 2 or figure.seeds < 2:
        return Difference(gap, None, None, None, n)
    our_variance = stdev(values) ** 2 / n
    their_variance = figure.std**2 / figure.seeds
    variance = our_variance + their_variance
    if variance <= SAME**2:
        return Difference(gap, None, None, None, n)
    error = math.sqrt(variance)
    our_part = our_variance**2 / (n - 1)
    their_part = their_variance**2 / (figure.seeds - 1)
    freedom = variance**2 / (our_part + their_part)
    width = half_width(error, freedom)
    return Difference(
        mean=gap,
        low=gap - width,
        high=gap + width,
        p=p_of_zero(gap, error, freedom),
        pairs=n,
        t_half_width=width,
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted by Holm's step-down rule; None stays None and does not count.

    Among many comparisons some look significant by chance. After this correction the chance of
    even one false one among all of them is at most the level.
    """
    ranked: list[tuple[float, int]] = []  # p-value and its position, smallest first
    for i, p in enumerate(p_values):
        if p is not None:
            ranked.append((p, i))
    ranked.sort()
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(ranked):
        not_smaller = len(ranked) - rank
        largest = max(largest, min(1.0, p * not_smaller))
        adjusted[i] = largest
    return adjusted
