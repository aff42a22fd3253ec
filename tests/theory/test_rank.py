from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.stats import spearmanr

from fedglimpse.theory.bound import Constants
from fedglimpse.theory.estimate import Measurement
from fedglimpse.theory.panel import LanePanel, Panel
from fedglimpse.theory.rank import comparison_text, correlate, grouped, shuffled_p, spearman


def lane(seed: int, deviation: float, accuracy: float) -> LanePanel:
    point = Measurement(0, 1.0, 1.0, 1.0, 1.0, deviation, deviation, 1.0, 1.0, 1.0, 1.0, 10, 5)
    constants = Constants(1.0, 1.0, 0.1, 1.0, 1.0, 1.0, deviation, 1.0, 1.0, 1.0, 10.0, 0.5, 0.2)
    return LanePanel(seed, [point], constants, None, 1.0, accuracy)


def test_spearman_is_that_of_scipy_also_with_ties() -> None:
    source = torch.Generator().manual_seed(0)
    for _ in range(20):
        a, b = torch.randint(6, (2, 9), generator=source).tolist()
        assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)


def test_a_constant_side_has_no_rank() -> None:
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0


def test_the_p_value_is_that_of_all_orders() -> None:
    a = [1.0, 2.0, 3.0, 4.0, 5.0]
    b = [2.0, 1.0, 3.0, 5.0, 4.0]
    observed = abs(spearman(a, b))
    orders = list(itertools.permutations(b))
    exact = sum(abs(spearman(a, order)) >= observed - 1e-9 for order in orders) / math.factorial(5)
    assert shuffled_p(a, b) == pytest.approx(exact, abs=0.01)


def test_opposite_ranks_correlate_fully() -> None:
    lanes = {f"m{i}": [lane(s, i + s, 1 - 0.1 * i + s) for s in range(3)] for i in range(4)}
    correlation = correlate(lanes, lambda panel: panel.relative_deviation)
    assert correlation.of_methods == pytest.approx(-1)
    assert correlation.within_seeds.mean == pytest.approx(-1)
    assert correlation.methods == 4
    assert correlation.leaving_one_out == pytest.approx((-1, -1))


def test_one_method_that_makes_the_correlation_is_visible() -> None:
    pairs = [(1, 1), (2, 2), (3, 3), (9, 0)]
    lanes = {f"m{i}": [lane(0, d, a)] for i, (d, a) in enumerate(pairs)}
    correlation = correlate(lanes, lambda panel: panel.relative_deviation)
    assert correlation.of_methods < 0 < correlation.leaving_one_out[1] == pytest.approx(1)


def test_within_seeds_is_blind_to_differences_between_seeds() -> None:
    """Seeds differ in both; within each seed the order is reversed."""
    lanes = {f"m{i}": [lane(s, 10 * s + i, 10 * s - i) for s in range(2)] for i in range(4)}
    correlation = correlate(lanes, lambda panel: panel.constants.deviation)
    assert correlation.within_seeds.mean == pytest.approx(-1)


def test_runs_of_one_method_join_unless_seeds_repeat() -> None:
    one, two = (Panel("a", "digits", [], [lane(s, 1, 1)]) for s in (0, 1))
    assert {n: len(v) for n, v in grouped([one, two], ["x", "y"]).items()} == {"a": 2}
    assert set(grouped([one, one], ["x", "y"])) == {"x", "y"}


def test_two_methods_have_no_correlation() -> None:
    panels = [Panel(m, "digits", [], [lane(0, i, i)]) for i, m in enumerate("ab")]
    assert "rank correlation" not in comparison_text(panels, ["a", "b"])
    panels.append(Panel("c", "digits", [], [lane(0, 5, 5)]))
    assert "rank correlation" in comparison_text(panels, ["a", "b", "c"])
