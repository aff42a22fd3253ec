"""Does a smaller selection deviation go with faster convergence? Ranks over methods and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.runs.summary import Estimate
from fedglimpse.theory.panel import LanePanel, Panel
from fedglimpse.theory.text import table

SHUFFLES = 20_000
LEAST_METHODS = 3  # for a rank correlation to mean anything
Measure = Callable[[LanePanel], float]
MEASURES: Mapping[str, Measure] = {
    "deviation ÷ random choice": lambda lane: lane.relative_deviation,
    "deviation": lambda lane: lane.constants.deviation,
    "d²": lambda lane: lane.constants.gap,
    "mean ‖∇F‖²": lambda lane: lane.measured,
    "accuracy": lambda lane: lane.accuracy,
}
PREDICTORS = ("deviation ÷ random choice", "deviation", "mean ‖∇F‖²")  # of accuracy
COLUMNS = ("deviation", "d²", "mean ‖∇F‖²")  # of the comparison, besides those with an interval


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of some measure with mean accuracy."""

    of_methods: float  # over methods, both averaged over seeds
    p: float  # share of shuffles of the methods with a correlation as far from 0
    within_seeds: Estimate  # over methods within each seed, then over seeds
    methods: int
    leaving_one_out: tuple[float, float]  # range of `of_methods` without one of the methods


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the correlation of ranks, ties sharing theirs; 0 where one side is constant."""
    x = _centred_ranks(a)
    y = _centred_ranks(b)
    scale = float(x.norm() * y.norm())
    if not scale:
        return 0.0
    return float(x @ y) / scale


def shuffled_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p-value of `spearman` under random pairings of `a` and `b`."""
    x = _centred_ranks(a)
    y = _centred_ranks(b)
    draw = rng.generator(0, "theory-shuffles", len(x))
    orders = torch.rand(SHUFFLES, len(x), generator=draw).argsort(1)
    shuffled = (y[orders] @ x).abs()  # [SHUFFLES]
    observed = (x @ y).abs()
    as_extreme = shuffled >= observed - 1e-9
    return (1 + int(as_extreme.sum())) / (1 + SHUFFLES)


def _centred_ranks(values: Sequence[float]) -> Tensor:
    """Return the rank of each value minus the mean rank; equal values share the mean of theirs."""
    numbers = torch.tensor(values, dtype=torch.float64)
    _, groups, sizes = numbers.unique(
        return_inverse=True,
        return_counts=True,
    )
    rank_of_group = sizes.cumsum(0) - (sizes - 1) / 2.0
    ranks = rank_of_group[groups].double()
    return ranks - ranks.mean()


def correlate(lanes: Mapping[str, Sequence[LanePanel]], measure: Measure) -> Correlation:
    """Correlate a measure with mean accuracy over methods.

    Args:
        lanes: name of a method -> its seeds.
        measure: what to correlate.
    """
    values = _means(lanes.values(), measure)
    accuracies = _means(lanes.values(), MEASURES["accuracy"])
    of_methods = spearman(values, accuracies)
    without_one = []
    for left_out in range(len(values)):
        other_values = list(values)
        other_accuracies = list(accuracies)
        del other_values[left_out]
        del other_accuracies[left_out]
        without_one.append(spearman(other_values, other_accuracies))
    within_seeds = _within_seeds(lanes, measure)
    return Correlation(
        of_methods=of_methods,
        p=shuffled_p(values, accuracies),
        within_seeds=Estimate.of(within_seeds or [of_methods]),
        methods=len(lanes),
        leaving_one_out=(min(without_one), max(without_one)),
    )


def correlations_of(lanes: Mapping[str, Sequence[LanePanel]]) -> dict[str, Correlation]:
    """Correlate each of `PREDICTORS` with mean accuracy over methods."""
    correlations = {}
    for label in PREDICTORS:
        correlations[label] = correlate(lanes, MEASURES[label])
    return correlations


def _within_seeds(lanes: Mapping[str, Sequence[LanePanel]], measure: Measure) -> list[float]:
    """Return the correlation over methods within each seed that all methods have."""
    by_seed = []  # of each method: seed -> lane
    seeds_of_methods = []
    for of_method in lanes.values():
        by_seed.append({lane.seed: lane for lane in of_method})
        seeds_of_methods.append({lane.seed for lane in of_method})
    common_seeds = set.intersection(*seeds_of_methods)
    correlations = []
    for seed in sorted(common_seeds):
        same_seed = [lane_of_seed[seed] for lane_of_seed in by_seed]
        values = _values(same_seed, measure)
        accuracies = _values(same_seed, MEASURES["accuracy"])
        correlations.append(spearman(values, accuracies))
    return correlations


def grouped(panels: Sequence[Panel], names: Sequence[str]) -> dict[str, list[LanePanel]]:
    """Return seeds by method; by folder name where a method was run twice with the same seed."""
    by_method: dict[str, list[LanePanel]] = {}
    by_folder: dict[str, list[LanePanel]] = {}
    for panel, name in zip(panels, names, strict=True):
        lanes_of_method = by_method.setdefault(panel.method, [])
        lanes_of_method.extend(panel.lanes)
        lanes_of_folder = by_folder.setdefault(name, [])
        lanes_of_folder.extend(panel.lanes)
    for lanes in by_method.values():
        seeds = {lane.seed for lane in lanes}
        if len(seeds) < len(lanes):
            return by_folder
    return by_method


def comparison_text(panels: Sequence[Panel], names: Sequence[str]) -> str:
    """Return one line for each method, best accuracy first, and the rank correlations."""
    groups = grouped(panels, names)
    accuracies = {}
    for name, lanes in groups.items():
        values = _values(lanes, MEASURES["accuracy"])
        accuracies[name] = Estimate.of(values)
    best_first = sorted(groups, key=lambda name: -accuracies[name].mean)
    body = []
    for name in best_first:
        lanes = groups[name]
        deviations = _values(lanes, MEASURES["deviation ÷ random choice"])
        row = [
            name,
            accuracies[name].text(),
            Estimate.of(deviations).text(scale=1, digits=2),
        ]
        for label in COLUMNS:
            average = mean(_values(lanes, MEASURES[label]))
            row.append(f"{average:.3g}")
        body.append(row)
    head = ["method", "accuracy %, mean over rounds", "deviation ÷ random", *COLUMNS]
    tables = [table(head, body)]
    if len(groups) >= LEAST_METHODS:
        correlations = correlations_of(groups)
        tables.append(correlation_text(correlations))
    return "\n\n".join(tables)


def _values(lanes: Iterable[LanePanel], measure: Measure) -> list[float]:
    return [measure(lane) for lane in lanes]


def _means(methods: Iterable[Sequence[LanePanel]], measure: Measure) -> list[float]:
    """Return the mean over seeds of each method."""
    return [mean(_values(lanes, measure)) for lanes in methods]


def correlation_text(correlations: Mapping[str, Correlation]) -> str:
    """Return the table of rank correlations with mean accuracy."""
    head = [
        "rank correlation of accuracy with",
        "over method means",
        "p",
        "without any one method",
        "within seeds, 95 %",
    ]
    body = []
    for name, correlation in correlations.items():
        low, high = correlation.leaving_one_out
        p = "< 0.001" if correlation.p < 0.001 else f"{correlation.p:.3f}"
        cells = [
            name,
            f"{correlation.of_methods:+.2f}",
            p,
            f"{low:+.2f} to {high:+.2f}",
            correlation.within_seeds.text(scale=1, digits=2),
        ]
        body.append(cells)
    return table(head, body)
