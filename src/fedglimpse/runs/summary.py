"""What a finished run amounts to: final accuracy over seeds with its interval, and its costs.

Student's t is from `scipy.special`, which is imported when the first interval is computed: it is
slow to import, and a run of one seed has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

LAST_ROUNDS = 50  # the paper's: accuracy is the mean over the last 50 rounds
LATECOMERS = "latecomers"  # entry of summary.json on clients that came late
COSTS = ("uplink_bytes", "downlink_bytes", "client_flops", "server_flops")


def half_width(error: float, freedom: float, level: float = 0.05) -> float:
    """Return half the width of the confidence interval of a mean, by default the 95 % one.

    Args:
        error: standard error of the mean.
        freedom: degrees of freedom; need not be whole.
        level: how often the interval may miss.
    """
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - level / 2)) * error


def p_of_zero(mean: float, error: float, freedom: float) -> float:
    """Return the two-sided p-value of a mean of zero, for a standard error above zero."""
    from scipy.special import stdtr

    return 2 * float(stdtr(freedom, -abs(mean) / error))


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % confidence interval (Student's t)."""

    mean: float
    half_width: float | None  # None for a single seed
    std: float | None

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """Estimate from one value for each seed."""
        if len(values) < 2:
            return Estimate(mean(values), None, None)
        spread = stdev(values)
        width = half_width(spread / math.sqrt(len(values)), len(values) - 1)
        return Estimate(mean(values), width, spread)

    def text(self, scale: float = 100, digits: int = 1) -> str:
        """Return `mean ± half width`, scaled."""
        shown = f"{self.mean * scale:.{digits}f}"
        if self.half_width is None:
            return shown
        return f"{shown} ± {self.half_width * scale:.{digits}f}"


def final_window(rounds: int) -> int:
    """Return over how many last rounds accuracy is averaged: 50, or a fifth of a short run."""
    return max(1, min(LAST_ROUNDS, rounds // 5))


def summarise(records: Sequence[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Return the summary of a run, one entry for each seed and estimates over seeds."""
    records_of_seed: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        records_of_seed.setdefault(record["seed"], []).append(record)
    seeds: dict[str, dict[str, Any]] = {}
    for seed, seed_records in records_of_seed.items():
        seeds[str(seed)] = _summary_of_seed(seed_records, rounds)
    accuracy = Estimate.of(_column(seeds.values(), "final_accuracy"))
    macro_f1 = Estimate.of(_column(seeds.values(), "final_macro_f1"))
    return {
        "rounds": rounds,
        "final_over_rounds": final_window(rounds),
        "final_accuracy": vars(accuracy),
        "final_macro_f1": vars(macro_f1),
        "costs": {name: mean(_column(seeds.values(), name)) for name in COSTS},
        "seconds": sum(_column(records, "seconds")),
        "seeds": seeds,
    }


def _summary_of_seed(records: Sequence[dict[str, Any]], rounds: int) -> dict[str, Any]:
    first = rounds - final_window(rounds)
    scored = [record for record in records if record["accuracy"] is not None]
    last = [record for record in records if record["round"] >= first]
    last_scored = [record for record in scored if record["round"] >= first]
    accuracies = _column(last_scored, "accuracy")
    summary = {
        "final_accuracy": mean(accuracies),
        "final_macro_f1": mean(_column(last_scored, "macro_f1")),
        "final_std_over_rounds": stdev(accuracies) if len(accuracies) > 1 else None,
        "final_reward": mean(_column(last, "reward")),
        "best_accuracy": max(_column(scored, "accuracy")),
        "rejected_updates": sum(len(record["rejected"]) for record in records),
    }
    for name in COSTS:
        summary[name] = sum(_column(records, name))
    return summary


def _column(rows: Iterable[Mapping[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]
