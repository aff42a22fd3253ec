from __future__ import annotations

import pytest
from scipy import stats

from fedglimpse.runs.summary import Estimate, final_window, summarise


def record(seed: int, number: int, accuracy: float | None) -> dict[str, object]:
    return {
        "seed": seed, "round": number, "accuracy": accuracy, "macro_f1": accuracy, "rejected": [],
        "uplink_bytes": 10, "downlink_bytes": 20, "client_flops": 30, "server_flops": 40,
        "seconds": 0.5, "reward": 0.5,
    }  # fmt: skip


def test_interval_agrees_with_scipy() -> None:
    values = [0.71, 0.74, 0.69, 0.75, 0.73]
    estimate = Estimate.of(values)
    low, high = stats.t.interval(0.95, 4, loc=estimate.mean, scale=stats.sem(values))
    assert estimate.half_width == pytest.approx((high - low) / 2)
    assert Estimate.of([0.5]).half_width is None


def test_final_accuracy_is_the_mean_of_the_last_rounds() -> None:
    assert [final_window(n) for n in (1, 4, 30, 250, 1500)] == [1, 1, 6, 50, 50]
    records = [record(s, t, t / 10 + s / 100) for s in (0, 1) for t in range(10)]
    summary = summarise(records, 10)
    assert summary["seeds"]["0"]["final_accuracy"] == pytest.approx((0.8 + 0.9) / 2)
    assert summary["final_accuracy"]["mean"] == pytest.approx(0.855)
    assert summary["costs"]["uplink_bytes"] == 100
    assert summary["seeds"]["1"]["final_reward"] == 0.5
