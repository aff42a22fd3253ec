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
    return float(x @ y) / scale if scale else 0.0


def shuffled_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p-value of `spearman` under random pairings of `a` and `b`."""
    x = _centred_ranks(a)
    y = _centred_ranks(b)
    draw = rng.generator(0, "theory-shuffles", len(x))
    orders = torch.rand(SHUFFLES, len(x), generator=draw).argsort(1)
    as_extreme = (y[orders] @ x).abs() >= (x @ y).abs() - 1e-9
    return (1 + int(as_extreme.sum())) / (1 + SHUFFLES)


def _centred_ranks(values: Sequence[float]) -> Tensor:
    """Return the rank of each value minus the mean rank; equal values share the mean of theirs."""
    numbers = torch.tensor(values, dtype=torch.float64)
    _, groups, sizes = numbers.unique(return_inverse=True, return_counts=True)
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
    for i in range(len(values)):
        rest_of_values = values[:i] + values[i + 1 :]
        rest_of_accuracies = accuracies[:i] + accuracies[i + 1 :]
        without_one.append(spearman(rest_of_values, rest_of_accuracies))
    return Correlation(
        of_methods=of_methods,
        p=shuffled_p(values, accuracies),
        within_seeds=Estimate.of(_within_seeds(lanes, measure) or [of_methods]),
        methods=len(lanes),
        leaving_one_out=(min(without_one), max(without_one)),
    )


def correlations_of(lanes: Mapping[str, Sequence[LanePanel]]) -> dict[str, Correlation]:
    """Correlate each of `PREDICTORS` with mean accuracy over methods."""
    return {label: correlate(lanes, MEASURES[label]) for label in PREDICTORS}


def _within_seeds(lanes: Mapping[str, Sequence[LanePanel]], measure: Measure) -> list[float]:
    """Return the correlation over methods within each seed that all methods have."""
    by_seed = []  # of each method: seed -> lane
    for of_method in lanes.values():
        by_seed.append({lane.seed: lane for lane in of_method})
    common_seeds = set.intersection(*map(set, by_seed))
    correlations = []
    for seed in sorted(common_seeds):
        same_seed = [seeds[seed] for seeds in by_seed]
        accuracies = _values(same_seed, MEASURES["accuracy"])
        correlations.append(spearman(_values(same_seed, measure), accuracies))
    return correlations


def grouped(panels: Sequence[Panel], names: Sequence[str]) -> dict[str, list[LanePanel]]:
    """Return seeds by method; by folder name where a method was run twice with the same seed."""
    by_method: dict[str, list[LanePanel]] = {}
    by_folder: dict[str, list[LanePanel]] = {}
    for panel, name in zip(panels, names, strict=True):
        by_method.setdefault(panel.method, []).extend(panel.lanes)
        by_folder.setdefault(name, []).extend(panel.lanes)
    for lanes in by_method.values():
        if len({lane.seed for lane in lanes}) < len(lanes):
            return by_folder
    return by_method


def comparison_text(panels: Sequence[Panel], names: Sequence[str]) -> str:
    """Return one line for each method, best accuracy first, and the rank correlations."""
    groups = grouped(panels, names)
    accuracies = {}
    for name, lanes in groups.items():
        accuracies[name] = Estimate.of(_values(lanes, MEASURES["accuracy"]))
    body = []
    for name in sorted(groups, key=lambda name: -accuracies[name].mean):
        deviation = Estimate.of(_values(groups[name], MEASURES["deviation ÷ random choice"]))
        row = [name, accuracies[name].text(), deviation.text(1, 2)]
        for label in COLUMNS:
            row.append(f"{mean(_values(groups[name], MEASURES[label])):.3g}")
        body.append(row)
    head = ["method", "accuracy %, mean over rounds", "deviation ÷ random", *COLUMNS]
    tables = [table(head, body)]
    if len(groups) >= LEAST_METHODS:
        tables.append(correlation_text(correlations_of(groups)))
    return "\n\n".join(tables)


def _values(lanes: Iterable[LanePanel], measure: Measure) -> list[float]:
    return [measure(lane) for lane in lanes]


def _means(methods: Iterable[Sequence[LanePanel]], measure: Measure) -> list[float]:
    """Return the mean over seeds of each method."""
    return [mean(_values(lanes, measure)) for lanes in methods]


def correlation_text(correlations: Mapping[str, Correlation]) -> str:
    """Return the table of rank correlations with mean accuracy."""
    head = ["rank correlation of accuracy with", "over method means", "p"]
    head += ["without any one method", "within seeds, 95 %"]
    body = []
    for name, correlation in correlations.items():
        low, high = correlation.leaving_one_out
        cells = [
            name,
            f"{correlation.of_methods:+.2f}",
            f"{correlation.p:.3f}" if correlation.p >= 0.001 else "< 0.001",
            f"{low:+.2f} to {high:+.2f}",
            correlation.within_seeds.text(1, 2),
        ]
        body.append(cells)
    return table(head, body)
