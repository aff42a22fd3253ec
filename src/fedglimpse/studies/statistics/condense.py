"""One run in few numbers: everything statistics need exactly, and a curve thinned for drawing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fedglimpse.runs.summary import COSTS, final_window, summarise
from fedglimpse.studies.compare import SMOOTHED_OVER
from fedglimpse.studies.statistics.censored import Spent

Record = dict[str, Any]
POINTS = 150  # of a thinned curve
DIGITS = 7  # of accuracies kept: finer than one example of any test set


@dataclass(frozen=True)
class Curve:
    """Accuracy over rounds, thinned; first and last scored round are always there."""

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

    def spent(self, what: str, target: float) -> Spent:
        """Return what reaching `target` took: `rounds` or one of `summary.COSTS`."""
        step = next((i for i, h in enumerate(self.heights) if h >= target), None)
        if what == "rounds":
            return Spent(self.played if step is None else self.rounds[step], step is not None)
        amount = self.totals[what] if step is None else self.costs[what][step]
        return Spent(amount, step is not None)


@dataclass(frozen=True)
class Facts:
    """One seed of one run."""

    accuracy: float | None  # mean over the last rounds; None for a run that is not finished
    macro_f1: float | None
    over_rounds: float | None  # standard deviation of the accuracy over the last rounds
    best: float | None
    rejected: int
    seconds: float
    curve: Curve
    climb: Climb
    reward: float | None = None  # smoothed score on the proxy set, mean over the last rounds
    first_tenth: float | None = None  # mean accuracy up to a tenth of the rounds played
    throughout: float | None = None  # mean accuracy of all scored rounds
    diverged: int = 0  # rounds with a score that is not finite, which counts as 0

    @property
    def early(self) -> float | None:
        """Mean accuracy over the first tenth of the rounds, None where none was scored.

        Exact, but for studies that were stored before it was kept: there the thinned curve has
        to do.
        """
        if self.first_tenth is not None:
            return self.first_tenth
        curve = zip(self.curve.rounds, self.curve.accuracy, strict=True)
        return _mean([accuracy for at, accuracy in curve if 10 * at <= self.climb.played])

    @property
    def whole(self) -> float | None:
        """Mean accuracy over the whole training; exact or from the thinned curve, as `early`."""
        return _mean(self.curve.accuracy) if self.throughout is None else self.throughout


def condense(records: Sequence[Record], rounds: int) -> Facts:
    """Condense the records of one seed, in order.

    A score that is no finite number is that of a model that has diverged and counts as 0: leaving
    it out would flatter the run.

    Args:
        records: as `rounds.jsonl` holds them.
        rounds: how many the run was meant to have.
    """
    diverged, records = _finite(records)
    costs = {name: _running(records, name) for name in COSTS}
    scored = [i for i, r in enumerate(records) if r["accuracy"] is not None]
    raw = [round(records[i]["accuracy"], DIGITS) for i in scored]
    smooth = _trailing_mean([records[i]["accuracy"] for i in scored])
    heights = [(records[i]["round"] + 1, float(records[i]["accuracy"])) for i in scored]
    played = records[-1]["round"] + 1 if records else 0
    counted = [i for i in scored if records[i]["round"] >= rounds - final_window(rounds)]
    final: Record = {}
    if played >= rounds and counted:
        final = next(iter(summarise(records, rounds)["seeds"].values()))
    return Facts(
        accuracy=final.get("final_accuracy"),
        macro_f1=final.get("final_macro_f1"),
        over_rounds=final.get("final_std_over_rounds"),
        reward=final.get("final_reward"),
        best=max(raw, default=None),
        rejected=sum(len(r["rejected"]) for r in records),
        seconds=sum(r["seconds"] for r in records),
        curve=_curve(scored, raw, smooth, records, costs),
        climb=_climb(scored, smooth, records, costs),
        first_tenth=_mean([a for r, a in heights if 10 * r <= played]),
        throughout=_mean([a for _, a in heights]),
        diverged=diverged,
    )


def _finite(records: Sequence[Record]) -> tuple[int, list[Record]]:
    """Return how many records have a score that is not finite, and all with 0 for such scores.

    Records are written with null for what is not finite. In a round that was not scored, all of
    the scores on the test set are null.
    """
    found, diverged = [], 0
    for record in records:
        tested = ("accuracy", "macro_f1", "per_class_f1")
        scored = any(record.get(name) is not None for name in tested)
        names = ("accuracy", "macro_f1", "reward") if scored else ("reward",)
        bad = [n for n in names if record[n] is None or not math.isfinite(record[n])]
        diverged += bool(bad)
        found.append({**record, **dict.fromkeys(bad, 0.0)} if bad else record)
    return diverged, found


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def thinned(count: int, points: int) -> list[int]:
    """Return at most `points` positions of 0..count-1, evenly spread, ends included."""
    if count <= points:
        return list(range(count))
    return sorted({round(i * (count - 1) / (points - 1)) for i in range(points)})


def _curve(
    scored: Sequence[int],
    raw: Sequence[float],
    smooth: Sequence[float],
    records: Sequence[Record],
    costs: Mapping[str, Sequence[int]],
) -> Curve:
    kept = thinned(len(scored), POINTS)
    return Curve(
        rounds=tuple(records[scored[i]]["round"] + 1 for i in kept),
        accuracy=tuple(raw[i] for i in kept),
        smooth=tuple(smooth[i] for i in kept),
        costs={name: tuple(sums[scored[i]] for i in kept) for name, sums in costs.items()},
    )


def _climb(
    scored: Sequence[int],
    smooth: Sequence[float],
    records: Sequence[Record],
    costs: Mapping[str, Sequence[int]],
) -> Climb:
    steps: list[int] = []
    for i, height in enumerate(smooth):
        if not steps or height > smooth[steps[-1]]:
            steps.append(i)
    return Climb(
        rounds=tuple(records[scored[i]]["round"] + 1 for i in steps),
        heights=tuple(smooth[i] for i in steps),
        costs={name: tuple(sums[scored[i]] for i in steps) for name, sums in costs.items()},
        played=records[-1]["round"] + 1 if records else 0,
        totals={name: sums[-1] if sums else 0 for name, sums in costs.items()},
    )


def _trailing_mean(values: Sequence[float]) -> list[float]:
    windows = (values[max(0, i + 1 - SMOOTHED_OVER) : i + 1] for i in range(len(values)))
    return [round(fmean(window), DIGITS) for window in windows]


def _running(records: Sequence[Record], name: str) -> list[int]:
    total, sums = 0, []
    for record in records:
        total += int(record[name])
        sums.append(total)
    return sums
