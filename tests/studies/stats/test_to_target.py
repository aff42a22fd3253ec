from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from fedglimpse.studies.report.numbers import cost
from fedglimpse.studies.statistics.condense import condense
from fedglimpse.studies.statistics.to_target import Saving, Spent, ToTarget, saving


def spent(*amounts: float) -> ToTarget:
    """Negative amounts are misses."""
    return ToTarget(tuple(Spent(abs(a), a > 0) for a in amounts))


def records(accuracies: list[float | None], bytes_each: int = 10) -> list[dict[str, object]]:
    return [
        {
            "seed": 0, "round": t, "accuracy": a, "macro_f1": a, "rejected": [], "reward": 0.5,
            "uplink_bytes": bytes_each, "downlink_bytes": 1, "client_flops": 2,
            "server_flops": t, "seconds": 0.5,
        }
        for t, a in enumerate(accuracies)
    ]  # fmt: skip


def first_round_above(values: np.ndarray, target: float) -> int | None:
    """Return the first round, from 1, whose mean over the last 10 rounds reaches the target."""
    for end in range(1, len(values) + 1):
        if values[max(0, end - 10) : end].mean() >= target:
            return end
    return None


def test_all_reached() -> None:
    found = spent(4, 6, 11)
    assert (found.exact, found.reached, found.at_least, found.median) == (True, 3, 7, 6)
    assert found.range == (4, 11)
    assert cost(found, "") == "7 [4–11]"


def test_a_miss_makes_the_mean_a_lower_bound() -> None:
    found = spent(4, 6, -80)
    assert (found.exact, found.reached, found.at_least, found.range) == (False, 2, 30, None)
    assert found.median == 6  # two of three got there: the middle one is known
    assert cost(found, "") == "≥ 30 (2 of 3)"
    assert cost(spent(-80, -80), "") == "> 80 (0 of 2)"
    assert spent(-80, -80).median is None


def test_the_median_stays_open_where_a_miss_ended_early() -> None:
    assert spent(4, 6, -5).median is None  # the miss may lie anywhere above 5
    assert spent(4, -6, -6).median is None
    assert spent(4, 6, -7, -7).median is None  # the upper of the two middle ones is a miss
    assert spent(4, 6, 8, -9).median == 7


@pytest.mark.parametrize("seed", range(8))
def test_median_agrees_with_kaplan_meier(seed: int) -> None:
    times = np.random.Generator(np.random.PCG64(seed)).integers(1, 140, 5).astype(float)
    ended = 80.0  # every run ends there
    found = ToTarget(tuple(Spent(min(t, ended), t <= ended) for t in times))
    data = stats.CensoredData(times[times <= ended], right=[ended] * int((times > ended).sum()))
    curve = stats.ecdf(data).sf
    below = curve.quantiles[curve.probabilities <= 0.5]
    assert found.median == (below[0] if len(below) else None)


def test_savings_are_bounds_where_someone_missed() -> None:
    whole, missed = spent(10, 10).runs, spent(10, -30).runs
    assert saving(spent(4, 6).runs, whole) == Saving(0.5, "=")
    assert saving(whole, missed) == Saving(0.5, "≥")
    assert saving(missed, whole) == Saving(-1.0, "≤")
    assert saving(missed, missed) == Saving(0.0, "?")
    assert saving((), ()) is None


@pytest.mark.parametrize(
    ("share", "bound", "text"),
    [
        (0.27, "=", "saves 27 %"),
        (0.27, "≥", "saves at least 27 %"),
        (0.27, "≤", "saves at most 27 %"),
        (-0.4, "=", "costs 40 % more"),
        (-0.4, "≥", "costs at most 40 % more"),
        (-1.5, "≤", "costs at least 2.5 times as much"),
        (-99, "=", "costs 100 times as much"),
        (0.5, "?", "inconclusive"),
    ],
)
def test_savings_in_words(share: float, bound: str, text: str) -> None:
    assert Saving(share, bound).text() == text


def test_costs_up_to_the_round_that_reached_it() -> None:
    climb = condense(records([0.1, None, 0.5, 0.3, 0.9]), 5).climb
    # trailing means: .1, -, .3, .3, .45
    assert climb.heights == (0.1, 0.3, 0.45)
    assert climb.spent("rounds", 0.3) == Spent(3, True)
    assert climb.spent("uplink_bytes", 0.3) == Spent(30, True)
    assert climb.spent("server_flops", 0.45) == Spent(0 + 1 + 2 + 3 + 4, True)
    assert climb.spent("rounds", 0.46) == Spent(5, False)
    assert climb.spent("uplink_bytes", 0.46) == Spent(50, False)


@pytest.mark.parametrize("target", [0.05, 0.2, 0.3, 0.41, 0.47, 0.9])
def test_any_target_is_exact_without_the_whole_curve(target: float) -> None:
    draw = np.random.Generator(np.random.PCG64(3))
    values = (0.5 * (1 - np.exp(-0.01 * np.arange(400))) + draw.normal(0, 0.05, 400)).round(4)
    rounds = records(values.tolist())
    facts, expected = condense(rounds, 400), first_round_above(values, target)
    found = facts.climb.spent("rounds", target)
    assert (found.amount if found.reached else None) == expected
    assert len(facts.climb.rounds) < 200
    assert len(facts.curve.rounds) == 150
    assert (facts.curve.rounds[0], facts.curve.rounds[-1]) == (1, 400)


def test_an_unfinished_run_has_no_final_accuracy() -> None:
    facts = condense(records([0.1, 0.2]), 10)
    assert (facts.accuracy, facts.best, facts.climb.played) == (None, 0.2, 2)
    whole = condense(records([0.1] * 8 + [0.5, 0.7]), 10)
    assert whole.accuracy == pytest.approx(0.6)
    assert whole.over_rounds == pytest.approx(np.std([0.5, 0.7], ddof=1))


def test_early_and_whole_are_exact_and_older_studies_use_the_curve() -> None:
    values = np.random.Generator(np.random.PCG64(5)).random(600).round(4).tolist()
    scored = [None if t % 2 else a for t, a in enumerate(values)]  # 300 scored, 150 on the curve
    facts = condense(records(scored), 600)
    assert facts.early == pytest.approx(np.mean(values[:60:2]), abs=1e-12)
    assert facts.whole == pytest.approx(np.mean(values[::2]), abs=1e-12)
    older = dataclasses.replace(facts, first_tenth=None, throughout=None)
    curve = dict(zip(facts.curve.rounds, facts.curve.accuracy, strict=True))
    assert older.early == pytest.approx(np.mean([a for at, a in curve.items() if at <= 60]))
    assert older.whole == pytest.approx(np.mean(list(curve.values())))
    assert older.early != facts.early
    none = condense(records([None] * 20), 20)
    assert (none.early, none.whole, none.accuracy) == (None, None, None)


def test_scores_that_are_no_numbers_count_as_nothing() -> None:
    facts = condense(records([0.5] * 8 + [float("nan"), 0.6]), 10)
    assert (facts.accuracy, facts.diverged, facts.best) == (pytest.approx(0.3), 1, 0.6)
    assert facts.climb.heights == (0.5,)
