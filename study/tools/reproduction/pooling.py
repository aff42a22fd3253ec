"""Differences over several settings; the seeds are what repeats.

Settings of one data set that share a seed share its partition, proxy set and initial model, and of
different data sets still who is visible and what is drawn. So their differences are not independent
pairs: averaged over settings, which have equal weight, they are one value for each seed. The noise
is that between these values. But a few of them may agree by chance, so it is computed a second time
as if settings shared nothing, and the wider interval and the larger p count. Data sets with
different seeds are taken to share nothing; their errors are combined as Banerjee does (Sankhya 22,
1960), each with the factor of its own number of seeds: if so, and if differences are normal, the
interval covers the truth 95 times of 100 or more, also if one data set has two seeds. Where they do
share some, `study/tests/test_pooling.py` still finds about as many. Data with a single seed show no
noise: then there is only a mean.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from fedglimpse.runs.summary import half_width
from fedglimpse.studies.statistics.difference import LEVEL, SAME, Difference

BISECTIONS = 40  # of the level, when looking for a p-value
Values = dict[int, float]  # seed -> value
Error = tuple[float, int]  # squared error, degrees of freedom


@dataclass(frozen=True)
class Pooled(Difference):
    """A mean over settings, with the seeds and settings it is based on."""

    settings: int
    seeds: Mapping[str, int]  # data -> seeds that all its settings have
    with_more_seeds: Pooled | None = None  # of the other data, if some have only one or two seeds


@dataclass(frozen=True)
class _Contribution:
    """What one data set, or several with the same seeds, add to the mean."""

    values: list[float]  # one for each seed
    independent_variance: float  # of such a value if settings shared nothing
    settings: int


def pool(groups: Mapping[str, Sequence[Values]]) -> Pooled | None:
    """Return the mean over settings and its noise over seeds.

    Args:
        groups: data -> for each of its settings the values of its seeds. Seeds that not all
            settings of the data have are left out; None if no seed is left.
    """
    seeds: dict[str, list[int]] = {}
    for data, settings in groups.items():
        seeds[data] = shared([values.keys() for values in settings])
    if not groups or not all(seeds.values()):
        return None
    total = sum(map(len, groups.values()))
    contributions: dict[tuple[int, ...], list[_Contribution]] = {}  # by their seeds
    mean = 0.0
    pairs = 0
    counts: dict[str, int] = {}
    for data, settings in groups.items():
        contribution = _contribution(settings, seeds[data], len(settings) / total)
        contributions.setdefault(tuple(seeds[data]), []).append(contribution)
        mean += fmean(contribution.values)
        pairs += len(settings) * len(seeds[data])
        counts[data] = len(seeds[data])
    fewest = min(counts.values())
    with_more_seeds = None
    if fewest <= 2:
        with_more_seeds = pool({data: groups[data] for data in groups if counts[data] > fewest})
    if fewest < 2:
        return Pooled(mean, None, None, None, pairs, total, counts, with_more_seeds)
    width, p = _noise(mean, [_sum(same_seeds) for same_seeds in contributions.values()])
    low = mean - width
    high = mean + width
    return Pooled(mean, low, high, p, pairs, total, counts, with_more_seeds)


def _contribution(settings: Sequence[Values], seeds: Sequence[int], weight: float) -> _Contribution:
    means: list[float] = []
    for seed in seeds:
        means.append(weight * fmean(values[seed] for values in settings))
    variances = 0.0
    if len(seeds) > 1:
        for values in settings:
            variances += variance([values[seed] for seed in seeds])
    independent = weight**2 * variances / len(settings) ** 2
    return _Contribution(means, independent, len(settings))


def _sum(contributions: Sequence[_Contribution]) -> _Contribution:
    """Add up data with the same seeds, seed by seed."""
    by_seed = zip(*[contribution.values for contribution in contributions], strict=True)
    independent = 0.0
    settings = 0
    for contribution in contributions:
        independent += contribution.independent_variance
        settings += contribution.settings
    return _Contribution(list(map(sum, by_seed)), independent, settings)


def _noise(mean: float, contributions: Sequence[_Contribution]) -> tuple[float, float]:
    """Return half of the 95 % interval and the p-value of zero."""
    between_seeds: list[Error] = []
    independent: list[Error] = []
    total_error = 0.0
    agreeing = 0
    for contribution in contributions:
        n = len(contribution.values)
        seed_error = variance(contribution.values) / n
        independent_error = contribution.independent_variance / n
        between_seeds.append((seed_error, n - 1))
        independent.append((independent_error, contribution.settings * (n - 1)))
        total_error += seed_error + independent_error
        agreeing += n
    if total_error <= (SAME * max(1.0, abs(mean))) ** 2:
        return 0.0, 1.0 if abs(mean) <= SAME else 2.0 ** (1 - agreeing)  # sign test, as in `paired`
    seed_width, seed_p = _banerjee(mean, between_seeds)
    independent_width, independent_p = _banerjee(mean, independent)
    return max(seed_width, independent_width), max(seed_p, independent_p)


def _banerjee(mean: float, errors: Sequence[Error]) -> tuple[float, float]:
    """Return half of the interval and the p-value of a sum of independent errors.

    With one error both are Student's.
    """
    width = _half_width(errors, LEVEL)
    if width <= 0:
        return 0.0, 0.0
    low = 0.0
    high = 1.0
    for _ in range(BISECTIONS):  # the level at which the interval ends at zero is the p-value
        level = (low + high) / 2
        if _half_width(errors, level) < abs(mean):
            high = level
        else:
            low = level
    return width, high


def _half_width(errors: Sequence[Error], level: float) -> float:
    squares = 0.0
    for squared_error, freedom in errors:
        if squared_error > 0:
            squares += half_width(math.sqrt(squared_error), freedom, level) ** 2
    return math.sqrt(squares)


def shared(seeds: Sequence[Collection[int]]) -> list[int]:
    """Return the seeds that all have."""
    return sorted(set.intersection(*map(set, seeds))) if seeds else []
