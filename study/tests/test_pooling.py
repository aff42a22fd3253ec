"""Pooling over settings: seeds are what repeats, settings count alike."""

from __future__ import annotations

from statistics import variance

import pytest
import torch
from scipy import stats

from fedglimpse import rng
from reproduction.pooling import Values, pool, shared


def of(*values: float) -> Values:
    return dict(enumerate(values))


def test_one_setting_is_the_paired_t_test() -> None:
    values = [0.3, 0.1, 0.4, 0.2]
    found, theirs = pool({"digits": [of(*values)]}), stats.ttest_1samp(values, 0.0)
    assert found is not None
    low, high = theirs.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((low, high, theirs.pvalue))
    assert (found.mean, found.pairs, found.settings) == (pytest.approx(0.25), 4, 1)


def test_the_same_setting_twice_tells_no_more_than_once() -> None:
    once, twice = (pool({"digits": [of(0.3, 0.1, 0.4)] * times}) for times in (1, 2))
    assert once is not None
    assert twice is not None
    assert (twice.low, twice.high, twice.p) == pytest.approx((once.low, once.high, once.p))


def test_settings_count_alike() -> None:
    found = pool({"a": [of(1.0, 1.2), of(3.0, 3.2)], "b": [of(8.0, 8.2, 8.4)]})
    assert found is not None
    assert found.mean == pytest.approx((1.1 + 3.1 + 8.2) / 3)
    assert found.seeds == {"a": 2, "b": 3}
    assert found.pairs == 7


def test_data_with_other_seeds_keep_the_factor_of_their_own_number() -> None:
    """Banerjee's interval; Welch's, which it replaces, is too narrow with two or three seeds."""
    a, b = [0.3, 0.1, 0.4, 0.2], [0.5, 0.0, 0.7]
    found = pool({"a": [of(*a)], "b": [of(*b)]})
    assert found is not None
    assert found.low is not None
    errors = [stats.sem(a) / 2, stats.sem(b) / 2]  # each data set is half of the mean

    def half(level: float) -> float:
        factors = [stats.t.ppf(1 - level / 2, len(values) - 1) for values in (a, b)]
        return sum((t * e) ** 2 for t, e in zip(factors, errors, strict=True)) ** 0.5

    assert found.mean - found.low == pytest.approx(half(0.05))
    assert found.p is not None
    assert half(found.p) == pytest.approx(found.mean)
    welch = stats.ttest_ind(a, [-x for x in b], equal_var=False)
    assert found.p > welch.pvalue


def test_one_seed_tells_nothing_and_the_rest_is_told_apart() -> None:
    found = pool({"a": [of(1.0)], "b": [of(0.1, 0.2)]})
    assert found is not None
    assert (found.low, found.high, found.p) == (None, None, None)
    assert found.with_more_seeds == pool({"b": [of(0.1, 0.2)]})
    alone = pool({"a": [of(1.0)]})
    assert alone is not None
    assert alone.with_more_seeds is None


def test_a_setting_that_was_not_run_leaves_nothing() -> None:
    assert pool({}) is None
    assert pool({"a": [of(1.0, 2.0), {}]}) is None
    assert pool({"a": [{0: 1.0}, {1: 1.0}]}) is None
    assert shared([[0, 1, 2], [2, 1]]) == [1, 2]
    assert shared([]) == []


@pytest.mark.parametrize(("value", "p"), [(0.0, 1.0), (0.1, 2.0**-1)])
def test_differences_that_are_all_the_same_are_judged_by_their_signs(
    value: float, p: float
) -> None:
    found = pool({"a": [of(value, value)], "b": [of(value, value)]})
    assert found is not None
    assert found.p == pytest.approx(p)
    assert found.low == found.high == pytest.approx(value)


def test_seeds_that_agree_by_luck_do_not_narrow_what_settings_show() -> None:
    """Seeds whose means are the same, of settings that go up and down."""
    settings = [of(0.0, 1.0, 2.0), of(2.0, 1.0, 0.0)]
    found = pool({"a": settings})
    assert found is not None
    assert found.low is not None
    error = (sum(variance(one.values()) for one in settings) / 4 / 3) ** 0.5
    assert found.mean - found.low == pytest.approx(stats.t.ppf(0.975, 4) * error)
    assert found.p == pytest.approx(2 * stats.t.sf(found.mean / error, 4))


def test_data_with_the_same_seeds_are_joined_seed_by_seed() -> None:
    a, b = [0.3, 0.1, 0.4, 0.2], [0.4, 0.0, 0.7, 0.1]
    theirs = stats.ttest_1samp([(x + y) / 2 for x, y in zip(a, b, strict=True)], 0.0)
    found = pool({"a": [of(*a)], "b": [of(*b)]})
    assert found is not None
    assert found.p == pytest.approx(theirs.pvalue)


def test_they_are_so_beside_data_with_other_seeds() -> None:
    """Two data sets with the same seeds are as one with the mean of both, whoever else is there."""
    a, b, c = [0.3, 0.1, 0.4, 0.2], [0.4, 0.0, 0.7, 0.1], [0.2, 0.9, 0.5]
    found = pool({"a": [of(*a)], "b": [of(*b)], "c": [of(*c)]})
    assert found is not None
    assert found.low is not None
    joined = [(x + y) / 3 for x, y in zip(a, b, strict=True)]
    own = [x / 3 for x in c]
    halves = [stats.t.ppf(0.975, len(v) - 1) * stats.sem(v) for v in (joined, own)]
    assert found.mean - found.low == pytest.approx((halves[0] ** 2 + halves[1] ** 2) ** 0.5)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("common", [0.0, 0.5, 1.0, 3.0])
def test_intervals_cover_however_much_a_seed_means(common: float, across: bool) -> None:
    """Four settings of two data sets, five seeds: 95 % of intervals hold the truth, or some more.

    What a seed means is common to the settings of a data set, or also to both data sets.
    """
    draws = rng.generator(0, "test", int(10 * common), across)
    covered, times = 0, 2000
    for _ in range(times):
        groups, both = {}, common * torch.randn(5, generator=draws)
        for data in ("a", "b"):
            seed_effect = both if across else common * torch.randn(5, generator=draws)
            rows = seed_effect + torch.randn(4, 5, generator=draws)
            groups[data] = [of(*row.tolist()) for row in rows]
        found = pool(groups)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0 <= found.high
    assert 0.935 <= covered / times <= 0.985


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("common", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("across", [False, True])
def test_intervals_cover_where_data_have_different_numbers_of_seeds(
    spread: float, common: float, across: bool
) -> None:
    """Two settings of two seeds beside two of five, as noisy or noisier; seeds may be shared."""
    draws = rng.generator(0, "test", int(spread), int(common), across)
    covered, times = 0, 1500
    for _ in range(times):
        means = common * torch.randn(5, generator=draws)
        others = means if across else common * torch.randn(5, generator=draws)
        few = spread * (means[:2] + torch.randn(2, 2, generator=draws))
        many = others + torch.randn(2, 5, generator=draws)
        found = pool({
            "few": [of(*row.tolist()) for row in few],
            "many": [of(*row.tolist()) for row in many],
        })  # fmt: skip
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.p is not None
        inside = found.low <= 0 <= found.high
        assert inside == (found.p > 0.05)
        covered += inside
    assert covered / times >= 0.935
