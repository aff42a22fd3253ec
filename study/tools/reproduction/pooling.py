"""Differences over several settings; what repeats is the seed.

Settings of one data set that share a seed share its partition, proxy set and initial model, and of
different data sets still who is visible and what is drawn. So their differences are no independent
pairs: averaged over settings, which count alike, they are one value for each seed. The noise is
that between these values. But a few of them may agree by luck, so it is worked out a second time as
if settings shared nothing, and the wider interval and the larger p count. Data sets with different
seeds are taken to share nothing; their errors are joined as Banerjee does (Sankhya 22, 1960), each
with the factor of its own number of seeds: if so, and if differences are normal, the interval holds
the truth 95 times of 100 or more, also where one data set has two seeds. Where they do share some,
`tests/reproduction` still finds about as many. Data with a single seed show no noise: then the mean
is all there is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from fedglimpse.runs.summary import half_width
from fedglimpse.studies.statistics.difference import LEVEL, SAME, Difference

STEPS = 40  # halvings that a p-value is looked for with
Values = dict[int, float]  # seed -> value


@dataclass(frozen=True)
class Pooled(Difference):
    """A mean over settings, with what it rests on."""

    settings: int
    seeds: Mapping[str, int]  # data -> seeds that all its settings have
    told: Pooled | None = None  # the same of the data with more seeds, where some have one or two


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
    parts = {data: _part(each, seeds[data], len(each) / total) for data, each in groups.items()}
    middle = sum(fmean(part.values) for part in parts.values())
    counted = {data: len(some) for data, some in seeds.items()}
    few = min(counted.values())
    rest = {data: each for data, each in groups.items() if counted[data] > few}
    told = pool(rest) if few <= 2 else None
    if few < 2:
        return Pooled(middle, None, None, None, pairs, total, counted, told)
    same: dict[tuple[int, ...], list[_Part]] = {}
    for data, part in parts.items():
        same.setdefault(tuple(seeds[data]), []).append(part)
    found = [_sum(some) for some in same.values()]
    return Pooled(middle, *_noise(middle, found), pairs, total, counted, told)


@dataclass(frozen=True)
class _Part:
    """What some data add to the mean."""

    values: list[float]  # one for each seed
    apart: float  # the variance of such a value if settings shared nothing
    settings: int


def _part(settings: Sequence[Values], seeds: Sequence[int], share: float) -> _Part:
    values = [share * fmean(values[seed] for values in settings) for seed in seeds]
    few = len(seeds) < 2
    each = [0.0 if few else variance([values[seed] for seed in seeds]) for values in settings]
    return _Part(values, share**2 * sum(each) / len(settings) ** 2, len(settings))


def _sum(parts: Sequence[_Part]) -> _Part:
    """Add up data with the same seeds, seed by seed."""
    by_seed = zip(*(part.values for part in parts), strict=True)
    apart, settings = (sum(getattr(part, name) for part in parts) for name in ("apart", "settings"))
    return _Part([sum(values) for values in by_seed], apart, settings)


def _noise(middle: float, parts: Sequence[_Part]) -> tuple[float, float, float]:
    """Return the 95 % interval and the p-value of zero."""
    rows = [(part, len(part.values)) for part in parts]
    seeds = [(variance(part.values) / n, n - 1) for part, n in rows]
    apart = [(part.apart / n, part.settings * (n - 1)) for part, n in rows]
    if sum(error for error, _ in [*seeds, *apart]) <= (SAME * max(1.0, abs(middle))) ** 2:
        agree = sum(n for _, n in rows)  # all the same: the sign test, as in `paired`
        return middle, middle, 1.0 if abs(middle) <= SAME else 2.0 ** (1 - agree)
    found = [_banerjee(middle, errors) for errors in (seeds, apart)]
    width, p = (max(numbers) for numbers in zip(*found, strict=True))
    return middle - width, middle + width, p


def _banerjee(middle: float, errors: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Return half of the interval and the p-value, from (squared error, degrees of freedom).

    With one error both are Student's.
    """

    def half(level: float) -> float:
        widths = (half_width(math.sqrt(e), free, level) for e, free in errors if e > 0)
        return math.sqrt(sum(width**2 for width in widths))

    width = half(LEVEL)
    if width <= 0:
        return 0.0, 0.0
    low, high = 0.0, 1.0  # the level at which the interval ends at zero is the p-value
    for _ in range(STEPS):
        level = (low + high) / 2
        low, high = (low, level) if half(level) < abs(middle) else (level, high)
    return width, high


def shared(seeds: Sequence[Collection[int]]) -> list[int]:
    """Return the seeds that all have."""
    return sorted(set.intersection(*map(set, seeds))) if seeds else []
