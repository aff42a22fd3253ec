"""Does a smaller selection deviation go with faster convergence? Ranks over methods and seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.runs.summary import Estimate
from fedglimpse.theory.panel import LanePanel, Panel
from fedglimpse.theory.text import table

SHUFFLES = 20_000
AT_LEAST = 3  # methods, for a rank correlation to mean anything
Measure = Callable[[LanePanel], float]
PREDICTORS: Mapping[str, Measure] = {
    "deviation ÷ random choice": lambda lane: lane.relative_deviation,
    "deviation": lambda lane: lane.constants.deviation,
    "mean ‖∇F‖²": lambda lane: lane.measured,
}


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of some measure with mean accuracy."""

    of_methods: float  # over methods, both averaged over seeds
    p: float  # share of shuffles of the methods with a correlation as far from 0
    within_seeds: Estimate  # over methods within each seed, then over seeds
    methods: int
    leaving_one_out: tuple[float, float]  # range of `of_methods` without one of the methods


def _ranks(values: Sequence[float]) -> Tensor:
    """Return the place of each value, from 1; equal ones share the mean of theirs."""
    numbers = torch.tensor(values, dtype=torch.float64)
    _, groups, sizes = numbers.unique(return_inverse=True, return_counts=True)
    return (sizes.cumsum(0) - (sizes - 1) / 2.0)[groups].double()


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the correlation of ranks, ties sharing theirs; 0 where one side is constant."""
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = float(x.norm() * y.norm())
    return float(x @ y) / scale if scale else 0.0


def shuffled_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p-value of `spearman` under random pairings of `a` and `b`."""
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    draw = rng.generator(0, "theory-shuffles", len(x))
    orders = torch.rand(SHUFFLES, len(x), generator=draw).argsort(1)
    as_far = (y[orders] @ x).abs() >= (x @ y).abs() - 1e-9
    return (1 + int(as_far.sum())) / (1 + SHUFFLES)


def correlate(lanes: Mapping[str, Sequence[LanePanel]], of: Measure) -> Correlation:
    """Correlate a measure with mean accuracy over methods.

    Args:
        lanes: name of a method -> its seeds.
        of: the measure.
    """
    pairs = {n: [(s.seed, of(s), s.accuracy) for s in some] for n, some in lanes.items()}
    means = [(mean(v for _, v, _ in p), mean(a for *_, a in p)) for p in pairs.values()]
    seeds = set.intersection(*({s for s, *_ in p} for p in pairs.values()))
    within = []
    for seed in sorted(seeds):
        some = [next((v, a) for s, v, a in p if s == seed) for p in pairs.values()]
        within.append(spearman(*zip(*some, strict=True)))
    values, accuracies = zip(*means, strict=True)
    fewer = [means[:i] + means[i + 1 :] for i in range(len(means))]
    without = [spearman(*zip(*some, strict=True)) for some in fewer]
    return Correlation(
        spearman(values, accuracies),
        shuffled_p(values, accuracies),
        Estimate.of(within or [spearman(values, accuracies)]),
        len(means),
        (min(without), max(without)),
    )


def grouped(panels: Sequence[Panel], names: Sequence[str]) -> dict[str, list[LanePanel]]:
    """Return seeds by method; by folder name where a method was run twice with the same seed."""
    keys = [(panel.method, lane.seed) for panel in panels for lane in panel.lanes]
    twice = len(set(keys)) < len(keys)
    groups: dict[str, list[LanePanel]] = {}
    for panel, name in zip(panels, names, strict=True):
        groups.setdefault(name if twice else panel.method, []).extend(panel.lanes)
    return groups


def comparison_text(panels: Sequence[Panel], names: Sequence[str]) -> str:
    """Return one line for each method, best accuracy first, and the rank correlations."""
    groups = grouped(panels, names)
    order = sorted(groups, key=lambda n: -mean(lane.accuracy for lane in groups[n]))
    head = ["method", "accuracy %, mean over rounds", "deviation ÷ random", "deviation", "d²"]
    head += ["mean ‖∇F‖²"]
    body = [
        [
            name,
            Estimate.of([lane.accuracy for lane in groups[name]]).text(),
            Estimate.of([lane.relative_deviation for lane in groups[name]]).text(1, 2),
            f"{mean(lane.constants.deviation for lane in groups[name]):.3g}",
            f"{mean(lane.constants.gap for lane in groups[name]):.3g}",
            f"{mean(lane.measured for lane in groups[name]):.3g}",
        ]
        for name in order
    ]
    parts = [table(head, body)]
    if len(groups) >= AT_LEAST:
        parts.append(correlation_text({n: correlate(groups, of) for n, of in PREDICTORS.items()}))
    return "\n\n".join(parts)


def correlation_text(found: Mapping[str, Correlation]) -> str:
    """Return the table of rank correlations with mean accuracy."""
    head = ["rank correlation of accuracy with", "over method means", "p"]
    head += ["without any one method", "within seeds, 95 %"]
    body = []
    for name, c in found.items():
        low, high = c.leaving_one_out
        between = f"{low:+.2f} to {high:+.2f}"
        chance = f"{c.p:.3f}" if c.p >= 0.001 else "< 0.001"
        body.append([name, f"{c.of_methods:+.2f}", chance, between, c.within_seeds.text(1, 2)])
    return table(head, body)
