"""Differences over several settings; what repeats is the seed.

Settings of one data set that share a seed share its partition, proxy set and initial model, so
their differences are no independent pairs: averaged over settings, they are one value for each
seed. Data sets share nothing, and are averaged in proportion to their settings, so that settings
count alike. The noise is that between seeds of one data set (interval and test: Welch's t). Data
with a single seed show none: then the mean is all there is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from fedglimpse.stats.difference import SAME, Difference
from fedglimpse.student import half_width, p_of_zero

Values = dict[int, float]  # seed -> value


@dataclass(frozen=True)
class Pooled(Difference):
    """A mean over settings, with what it rests on."""

    settings: int
    seeds: Mapping[str, int]  # data -> seeds that all its settings have
    told: Pooled | None = None  # the same of the data that have two seeds, where some do not


def pool(groups: Mapping[str, Sequence[Values]]) -> Pooled | None:
    """Return the mean over settings and its noise over seeds.

    Args:
        groups: data -> for each of its settings the values of its seeds. Seeds that not all
            settings of the data have are left out; None where none is left.
    """
    seeds = {data: shared([values.keys() for values in each]) for data, each in groups.items()}
    if not groups or not all(seeds.values()):
        return None
    total = sum(map(len, groups.values()))
    pairs = sum(len(groups[data]) * len(some) for data, some in seeds.items())
    means = {d: [fmean(v[s] for v in each) for s in seeds[d]] for d, each in groups.items()}
    shares = {data: len(each) / total for data, each in groups.items()}
    middle = sum(shares[data] * fmean(values) for data, values in means.items())
    counted = {data: len(some) for data, some in seeds.items()}
    if min(counted.values()) < 2:
        rest = pool({data: each for data, each in groups.items() if counted[data] > 1})
        return Pooled(middle, None, None, None, pairs, total, counted, rest)
    low, high, p = _noise(middle, [(shares[data], values) for data, values in means.items()])
    return Pooled(middle, low, high, p, pairs, total, counted)


def _noise(
    middle: float, parts: Sequence[tuple[float, Sequence[float]]]
) -> tuple[float, float, float]:
    """Return the 95 % interval and the p-value of zero, from (share, values over seeds)."""
    errors = [share**2 * variance(values) / len(values) for share, values in parts]
    error = sum(errors)
    if error <= (SAME * max(1.0, abs(middle))) ** 2:  # all the same: the sign test, as in `paired`
        agree = sum(len(values) for _, values in parts)
        return middle, middle, 1.0 if abs(middle) <= SAME else 2.0 ** (1 - agree)
    freedom = error**2 / sum(
        e**2 / (len(values) - 1) for e, (_, values) in zip(errors, parts, strict=True)
    )
    width = half_width(math.sqrt(error), freedom)
    return middle - width, middle + width, p_of_zero(middle, math.sqrt(error), freedom)


def shared(seeds: Sequence[Collection[int]]) -> list[int]:
    """Return the seeds that all have."""
    return sorted(set.intersection(*map(set, seeds))) if seeds else []
