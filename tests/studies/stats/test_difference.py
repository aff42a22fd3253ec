from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedglimpse.studies.statistics.difference import (
    COVERAGE,
    Difference,
    Published,
    against_published,
    bootstrap_interval,
    holm,
    paired,
)

OURS = {0: 0.71, 1: 0.74, 2: 0.69, 3: 0.75, 4: 0.73}
CONTROL = {0: 0.70, 1: 0.70, 2: 0.68, 3: 0.71, 4: 0.72}


def test_differences_are_taken_seed_by_seed() -> None:
    found = paired(OURS, {**CONTROL, 9: 0.1})  # a seed that only one side has does not count
    assert found is not None
    assert found.pairs == 5
    assert found.mean == pytest.approx((0.01 + 0.04 + 0.01 + 0.04 + 0.01) / 5)
    expected = stats.ttest_rel(list(OURS.values()), list(CONTROL.values()))
    assert found.p == pytest.approx(expected.pvalue)
    assert found.t_interval == pytest.approx(expected.confidence_interval(0.95))
    assert paired({0: 0.5}, {1: 0.5}) is None


def test_one_pair_says_nothing_about_noise() -> None:
    found = paired({0: 0.5}, {0: 0.4})
    assert found is not None
    assert (found.low, found.high, found.p, found.t_interval) == (None, None, None, None)
    assert found.verdict(None) == "inconclusive"


def test_no_difference_at_all_is_noise() -> None:
    same = paired({0: 0.5, 1: 0.7}, {0: 0.5, 1: 0.7})
    assert same is not None
    assert (same.p, same.low, same.high) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("pairs", "verdict"), [(2, "inconclusive"), (5, "inconclusive"), (6, "significant")]
)
def test_few_differences_that_agree_exactly_are_not_significant(pairs: int, verdict: str) -> None:
    # 0.25 each time; as many signs of one kind come up in 2 of 2^n throws of a coin
    seeds = range(pairs)
    always = paired(dict.fromkeys(seeds, 0.75), dict.fromkeys(seeds, 0.5))
    assert always is not None
    assert (always.p, always.low, always.high) == (2 / 2**pairs, 0.25, 0.25)
    assert always.verdict(always.p) == verdict


def test_differences_that_agree_up_to_rounding_are_the_same() -> None:
    found = paired({0: 0.3, 1: 0.8}, {0: 0.2, 1: 0.7})
    assert 0.3 - 0.2 != 0.8 - 0.7
    assert found is not None
    assert found.p == 0.5
    amounts = paired({0: 3e9, 1: 4e9}, {0: 1e9, 1: 2e9 + 0.1})
    assert amounts is not None
    assert amounts.p == 0.5


def test_bootstrap_of_three_by_hand() -> None:
    # 27 resamples; the lowest, three times the smallest value, has 1/27 = 3.7 % > 2.5 %.
    assert bootstrap_interval([0.0, 3.0, 6.0]) == (0.0, 6.0)
    # 256 resamples, six may be cut off at each end. Lowest means: 0 (once), 0.2 (4 ways), 0.4 (6);
    # highest: 8 (once), 7 (4 ways), 6.2 (4).
    low, high = bootstrap_interval([0.0, 0.8, 4.0, 8.0])
    assert (low, high) == (pytest.approx(0.4), pytest.approx(6.2))


@pytest.mark.parametrize("n", [5, 12])
def test_bootstrap_agrees_with_scipy(n: int) -> None:
    values = np.random.Generator(np.random.PCG64(n)).normal(1, 2, n)
    expected = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=20_000,
        random_state=np.random.Generator(np.random.PCG64(0)),
    ).confidence_interval  # fmt: skip
    low, high = bootstrap_interval(values.tolist())
    assert low == pytest.approx(expected.low, abs=0.08)
    assert high == pytest.approx(expected.high, abs=0.08)
    assert (low, high) == bootstrap_interval(values.tolist())  # nothing is left to chance


@pytest.mark.parametrize(("n", "studies"), [(2, 2000), (3, 2000), (5, 1000), (8, 300)])
def test_coverage_with_few_seeds_is_what_the_report_says(n: int, studies: int) -> None:
    draws = np.random.Generator(np.random.PCG64(n)).normal(size=(studies, n)).tolist()
    intervals = [bootstrap_interval(row) for row in draws]
    covered = sum(low <= 0 <= high for low, high in intervals) / len(intervals)
    assert covered == pytest.approx(COVERAGE[n], abs=0.03)


def test_coverage_is_given_for_these_numbers_of_pairs() -> None:
    assert COVERAGE == {2: 0.50, 3: 0.75, 5: 0.84, 8: 0.89}


def test_published_figures_are_compared_by_welch() -> None:
    ours, theirs = list(OURS.values()), Published(0.65, 0.03, 5)
    found = against_published(ours, theirs)
    expected = stats.ttest_ind_from_stats(
        np.mean(ours), np.std(ours, ddof=1), 5, 0.65, 0.03, 5, equal_var=False
    )
    assert found.p == pytest.approx(expected.pvalue)
    assert found.mean == pytest.approx(0.074)
    wide = stats.ttest_ind_from_stats(  # shifted to the end of the interval, p is 5 %
        np.mean(ours) - (found.high or 0), np.std(ours, ddof=1), 5, 0.65, 0.03, 5, equal_var=False
    )
    assert wide.pvalue == pytest.approx(0.05)
    assert against_published([0.7], theirs).p is None


def test_without_any_spread_published_figures_cannot_be_told_apart() -> None:
    for ours, theirs in (
        ([0.7, 0.7], Published(0.6, 0.0, 5)),
        ([0.7, 0.8], Published(0.6, 0.1, 1)),
    ):
        found = against_published(ours, theirs)
        assert (found.low, found.high, found.p) == (None, None, None)
        assert found.verdict(found.p) == "inconclusive"


def test_holm_by_hand() -> None:
    # sorted .005 .01 .03 .04 times 4 3 2 1 = .02 .03 .06 .04, never falling
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([None]) == [None]


def test_real_needs_both_the_interval_and_the_corrected_test() -> None:
    apart = Difference(0.02, 0.01, 0.03, 0.01, 5)
    assert apart.verdict(0.04) == "significant"
    assert apart.verdict(0.06) == "inconclusive"
    assert Difference(0.02, -0.01, 0.05, 0.01, 5).verdict(0.01) == "not significant"
    assert Difference(-0.02, -0.03, -0.01, 0.01, 5).verdict(0.01) == "significant"


def test_seeds_of_several_settings_are_pooled() -> None:
    ours = {(0, 0): 0.5, (0, 1): 0.6, (1, 0): 0.8}
    theirs = {(0, 0): 0.4, (1, 0): 0.6, (1, 1): 0.1}
    found = paired(ours, theirs)
    assert found is not None
    assert (found.pairs, found.mean) == (2, pytest.approx(0.15))
