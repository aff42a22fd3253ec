"""Student's t: how wide an interval of few values is, and how rare a mean is by luck.

From `scipy.special`, because importing `scipy.stats` takes every command another half second.

What a finished run amounts to: final accuracy over seeds, and what it cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from scipy.special import stdtr, stdtrit


def half_width(error: float, freedom: float, level: float = 0.05) -> float:
    """Return half of the interval of a mean, the 95 % one unless said otherwise.

    Args:
        error: standard error of the mean.
        freedom: degrees of freedom; need not be whole.
        level: how often it may miss.
    """
    return float(stdtrit(freedom, 1 - level / 2)) * error


def p_of_zero(mean: float, error: float, freedom: float) -> float:
    """Return the two-sided p-value of a mean of zero, for a standard error above zero."""
    return 2 * float(stdtr(freedom, -abs(mean) / error))


LAST_ROUNDS = 50  # the paper's: accuracy is the mean over the last 50 rounds
COSTS = ("uplink_bytes", "downlink_bytes", "client_flops", "server_flops")


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
    seeds = list(dict.fromkeys(r["seed"] for r in records))
    each = {seed: _one_seed([r for r in records if r["seed"] == seed], rounds) for seed in seeds}
    final = Estimate.of([entry["final_accuracy"] for entry in each.values()])
    return {
        "rounds": rounds,
        "final_over_rounds": final_window(rounds),
        "final_accuracy": vars(final),
        "final_macro_f1": vars(Estimate.of([e["final_macro_f1"] for e in each.values()])),
        "costs": {name: mean(entry[name] for entry in each.values()) for name in COSTS},
        "seconds": sum(r["seconds"] for r in records),
        "seeds": {str(seed): entry for seed, entry in each.items()},
    }


def _one_seed(records: Sequence[dict[str, Any]], rounds: int) -> dict[str, Any]:
    scored = [r for r in records if r["accuracy"] is not None]
    first = rounds - final_window(rounds)
    last = [r for r in scored if r["round"] >= first]
    return {
        "final_accuracy": mean(r["accuracy"] for r in last),
        "final_macro_f1": mean(r["macro_f1"] for r in last),
        "final_std_over_rounds": stdev(r["accuracy"] for r in last) if len(last) > 1 else None,
        "final_reward": mean(r["reward"] for r in records if r["round"] >= first),
        "best_accuracy": max(r["accuracy"] for r in scored),
        "rejected_updates": sum(len(r["rejected"]) for r in records),
        **{name: sum(r[name] for r in records) for name in COSTS},
    }
