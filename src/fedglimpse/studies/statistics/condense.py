"""One run in few numbers: everything that statistics need exactly, and a curve to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from fedglimpse.runs.summary import COSTS, final_window, summarise
from fedglimpse.studies.statistics.to_target import Spent

T = TypeVar("T")
Record = dict[str, Any]
SMOOTHED_OVER = 10  # scored rounds in the trailing mean that must reach a target
POINTS = 150  # of a thinned curve
DIGITS = 7  # of stored accuracies: finer than one example of any test set


@dataclass(frozen=True)
class Curve:
    """Accuracy over rounds, thinned; the first and the last scored round are always included."""

    rounds: tuple[int, ...]  # counted from 1
    accuracy: tuple[float, ...]
    smooth: tuple[float, ...]  # mean over the last 10 scored rounds, fewer at the start
    costs: Mapping[str, tuple[int, ...]]  # spent up to and including that round


@dataclass(frozen=True)
class Climb:
    """Every round at which the trailing mean accuracy rose above all before, with costs so far.

    The mean is over the last 10 scored rounds, or over as many as there are so far. This is all
    that is needed to say exactly what *any* target cost, without the whole curve.
    """

    rounds: tuple[int, ...]  # counted from 1, rising
    heights: tuple[float, ...]  # rising
    costs: Mapping[str, tuple[int, ...]]  # spent up to and including that round
    played: int  # rounds of the run so far
    totals: Mapping[str, int]  # spent in all of them

    def spent(self, measure: str, target: float) -> Spent:
        """Return what reaching `target` took: `rounds` or one of `summary.COSTS`."""
        reached_at = None
        for i, height in enumerate(self.heights):
            if height >= target:
                reached_at = i
                break
        if reached_at is None:
            total = self.played if measure == "rounds" else self.totals[measure]
            return Spent(total, reached=False)
        amounts = self.rounds if measure == "rounds" else self.costs[measure]
        return Spent(amounts[reached_at], reached=True)


@dataclass(frozen=True)
class Facts:
    """What is kept of one seed of one run."""

    accuracy: float | None  # mean over the last rounds; None for a run that is not finished
    macro_f1: float | None
    over_rounds: float | None  # standard deviation of the accuracy over the last rounds
    best: float | None
    rejected: int
    seconds: float
    curve: Curve
    climb: Climb
    reward: float | None = None  # smoothed score on the proxy set, mean over the last rounds
    first_tenth: float | None = None  # mean accuracy up to a tenth of the rounds so far
    throughout: float | None = None  # mean accuracy of all scored rounds
    diverged: int = 0  # rounds with a score that is not finite, which counts as 0

    @property
    def early(self) -> float | None:
        """Mean accuracy over the first tenth of the rounds; None if none of them was scored.

        Exact, except for studies stored before `first_tenth` existed: they have only the thinned
        curve.
        """
        if self.first_tenth is not None:
            return self.first_tenth
        curve = self.curve
        return _mean_of_first_tenth(curve.rounds, curve.accuracy, self.climb.played)

    @property
    def whole(self) -> float | None:
        """Mean accuracy over the whole training; exact or from the thinned curve, as `early`."""
        return _mean(self.curve.accuracy) if self.throughout is None else self.throughout


@dataclass(frozen=True)
class _Scored:
    """The scored rounds of one run, with the costs of all rounds up to each of them."""

    rounds: Sequence[int]  # counted from 1
    accuracy: Sequence[float]
    smooth: Sequence[float]  # trailing mean, rounded
    costs: Mapping[str, Sequence[int]]
    totals: Mapping[str, int]  # costs of the whole run

    def costs_at(self, positions: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the costs up to some of the scored rounds."""
        costs: dict[str, tuple[int, ...]] = {}
        for name, amounts in self.costs.items():
            costs[name] = _at(amounts, positions)
        return costs


def condense(records: Sequence[Record], rounds: int) -> Facts:
    """Condense the records of one seed, in order.

    A score that is not a finite number comes from a model that has diverged and counts as 0:
    leaving it out would flatter the run.

    Args:
        records: as `rounds.jsonl` holds them.
        rounds: how many the run was meant to have.
    """
    diverged, records = _without_divergence(records)
    scored = _scored(records)
    rounds_run = records[-1]["round"] + 1 if records else 0
    has_final = bool(scored.rounds) and scored.rounds[-1] > rounds - final_window(rounds)
    final: Record = {}
    if rounds_run >= rounds and has_final:
        final = next(iter(summarise(records, rounds)["seeds"].values()))
    rejected = 0
    seconds = 0.0
    for record in records:
        rejected += len(record["rejected"])
        seconds += record["seconds"]
    return Facts(
        accuracy=final.get("final_accuracy"),
        macro_f1=final.get("final_macro_f1"),
        over_rounds=final.get("final_std_over_rounds"),
        reward=final.get("final_reward"),
        best=round(max(scored.accuracy), DIGITS) if scored.accuracy else None,
        rejected=rejected,
        seconds=seconds,
        curve=_curve(scored),
        climb=_climb(scored, rounds_run),
        first_tenth=_mean_of_first_tenth(scored.rounds, scored.accuracy, rounds_run),
        throughout=_mean(scored.accuracy),
        diverged=diverged,
    )


def _without_divergence(records: Sequence[Record]) -> tuple[int, list[Record]]:
    """Return how many records have a score that is not finite, and all with 0 for such scores.

    Records are written with null for what is not finite. In a round that was not scored, all of
    the scores on the test set are null.
    """
    diverged = 0
    finite_records: list[Record] = []
    for record in records:
        zeros: Record = {}
        scores = ("accuracy", "macro_f1", "reward") if _was_scored(record) else ("reward",)
        for name in scores:
            value = record[name]
            if value is None or not math.isfinite(value):
                zeros[name] = 0.0
        if zeros:
            diverged += 1
        finite_records.append({**record, **zeros})
    return diverged, finite_records


def _was_scored(record: Record) -> bool:
    names = ("accuracy", "macro_f1", "per_class_f1")
    return any(record.get(name) is not None for name in names)


def _scored(records: Sequence[Record]) -> _Scored:
    rounds: list[int] = []
    accuracy: list[float] = []
    costs: dict[str, list[int]] = {name: [] for name in COSTS}
    totals = dict.fromkeys(COSTS, 0)
    for record in records:
        for name in COSTS:
            totals[name] += int(record[name])
        if record["accuracy"] is None:
            continue
        rounds.append(record["round"] + 1)
        accuracy.append(float(record["accuracy"]))
        for name in COSTS:
            costs[name].append(totals[name])
    return _Scored(
        rounds=rounds,
        accuracy=accuracy,
        smooth=_trailing_mean(accuracy),
        costs=costs,
        totals=totals,
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _mean_of_first_tenth(
    rounds: Sequence[int],
    accuracy: Sequence[float],
    rounds_run: int,
) -> float | None:
    early: list[float] = []
    for number, value in zip(rounds, accuracy, strict=True):
        if 10 * number <= rounds_run:
            early.append(value)
    return _mean(early)


def thinned(count: int, points: int) -> list[int]:
    """Return at most `points` positions of 0..count-1, evenly spread, both ends included."""
    if count <= points:
        return list(range(count))
    step = points - 1
    positions = {round(i * (count - 1) / step) for i in range(points)}
    return sorted(positions)


def _curve(scored: _Scored) -> Curve:
    positions = thinned(len(scored.rounds), POINTS)
    accuracies = _at(scored.accuracy, positions)
    return Curve(
        rounds=_at(scored.rounds, positions),
        accuracy=tuple(round(accuracy, DIGITS) for accuracy in accuracies),
        smooth=_at(scored.smooth, positions),
        costs=scored.costs_at(positions),
    )


def _climb(scored: _Scored, rounds_run: int) -> Climb:
    steps: list[int] = []
    for i, height in enumerate(scored.smooth):
        if not steps or height > scored.smooth[steps[-1]]:
            steps.append(i)
    return Climb(
        rounds=_at(scored.rounds, steps),
        heights=_at(scored.smooth, steps),
        costs=scored.costs_at(steps),
        played=rounds_run,
        totals=scored.totals,
    )


def _at(values: Sequence[T], positions: Sequence[int]) -> tuple[T, ...]:
    return tuple(values[i] for i in positions)


def _trailing_mean(values: Sequence[float]) -> list[float]:
    means: list[float] = []
    for end in range(1, len(values) + 1):
        window = values[max(0, end - SMOOTHED_OVER) : end]
        means.append(round(fmean(window), DIGITS))
    return means
