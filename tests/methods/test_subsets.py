from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fakes
from fedglimpse.methods.dpp import log_volume
from fedglimpse.methods.herd import nearness
from fedglimpse.methods.oracle_balance import evenness
from fedglimpse.methods.subsets import (
    EXACT_LIMIT,
    SubsetSearch,
    Value,
    all_subsets,
)


def herd_value(g: torch.Generator) -> Value:
    return nearness(torch.randn(12, 6, generator=g), torch.randint(5, 50, (12,), generator=g))


VALUES = {
    "herd": herd_value,
    "oracle": lambda g: evenness(torch.randint(0, 30, (12, 5), generator=g).float()),
    "dpp": lambda g: log_volume(torch.randn(12, 6, generator=g)),
}


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def of(value: Value, slots: Tensor) -> float:
    return float(value(slots[None]))


@pytest.mark.parametrize("kind", VALUES)
def test_the_greedy_answer_is_close_to_the_exact_one(kind: str) -> None:
    everything = torch.combinations(torch.arange(12), 5)
    ranks = []
    num_best = 0
    for seed in range(20):
        value = VALUES[kind](draw(seed))
        greedy = SubsetSearch(value, 12, draw(seed)).greedy(5)
        polished = SubsetSearch(value, 12, draw(seed)).near_best(5)
        exact = SubsetSearch(value, 12, draw(seed)).exact(5)
        assert len(set(polished.tolist())) == 5
        improved = of(value, SubsetSearch(value, 12, draw(seed)).improve(greedy))
        assert of(value, greedy) <= improved + 1e-12
        assert of(value, polished) <= of(value, exact) + 1e-12
        assert of(value, exact) == pytest.approx(float(value(everything).max()))
        num_best += math.isclose(of(value, polished), of(value, exact), rel_tol=1e-6, abs_tol=1e-12)
        ranks.append(float((value(everything) > of(value, polished) + 1e-12).double().mean()))
    assert max(ranks) < 0.02  # never worse than the best fiftieth of all subsets
    assert num_best >= 15  # and mostly the best of all


def test_search_is_exact_up_to_the_limit_and_greedy_beyond() -> None:
    sizes_of_calls: list[int] = []

    def value(subsets: Tensor) -> Tensor:
        sizes_of_calls.append(len(subsets))
        return subsets.double().sum(1)

    assert SubsetSearch(value, 10, draw()).best(5).tolist() == [5, 6, 7, 8, 9]
    assert sizes_of_calls == [math.comb(10, 5)]
    sizes_of_calls.clear()
    assert math.comb(30, 5) > EXACT_LIMIT
    assert SubsetSearch(value, 30, draw()).best(5).tolist() == [25, 26, 27, 28, 29]
    assert max(sizes_of_calls) <= 30


def test_small_sets_are_taken_whole() -> None:
    for num in (1, 3):
        slots = SubsetSearch(lambda s: torch.zeros(len(s)), num, draw()).best(5)
        assert slots.tolist() == list(range(num))


@pytest.mark.parametrize(("num", "k"), [(10, 9), (10, 10), (20, 20), (100, 99), (4, 2)])
def test_all_subsets_of_nearly_all_are_few(num: int, k: int) -> None:
    subsets = all_subsets(num, k)
    assert subsets.shape == (math.comb(num, k), k)
    assert len({tuple(row) for row in subsets.tolist()}) == len(subsets)
    assert (subsets.diff(dim=1) > 0).all()


def test_ties_are_drawn_and_rounding_makes_no_difference() -> None:
    def value(subsets: Tensor) -> Tensor:
        return torch.linspace(0, 1e-13, len(subsets)) - 100.0 * (subsets[:, 0] > 2)

    seen = {tuple(SubsetSearch(value, 5, draw(s)).exact(1).tolist()) for s in range(50)}
    assert seen == {(0,), (1,), (2,)}


def test_herd_finds_the_mean_of_all() -> None:
    sketches = torch.tensor([[3.0, 0], [-3, 0], [0, 3], [0, -3], [9, 9], [-9, -9]])
    even = torch.full((6,), 10)
    selector = fakes.build("herd").selector
    view = fakes.view(ids=range(6), sizes=even, reports={"delta_sketch": sketches})
    for k in (2, 4):
        slots = selector.select(view, k).slots
        assert sketches[slots].mean(0).abs().max() < 1e-6
    by_hand = min(
        torch.combinations(torch.arange(6), 3),
        key=lambda s: float((sketches[s].mean(0) - sketches.mean(0)).norm()),
    )
    value = nearness(sketches, even)
    assert of(value, selector.select(view, 3).slots) == pytest.approx(of(value, by_hand))


def test_herd_counts_clients_by_size() -> None:
    sketches = torch.tensor([[0.0], [1.0], [4.0]])
    sizes = torch.tensor([1, 1, 98])
    view = fakes.view(ids=range(3), sizes=sizes, reports={"delta_sketch": sketches})
    assert fakes.build("herd").selector.select(view, 1).slots.tolist() == [2]


def test_dpp_avoids_duplicates_and_clients_that_did_not_move() -> None:
    sketches = torch.tensor([[1.0, 0, 0], [2, 0, 0], [0, 1, 0], [0, 5, 0.1], [0, 0, 1], [0, 0, 0]])
    selector = fakes.build("dpp").selector
    for seed in range(10):
        view = fakes.view(ids=range(6), reports={"delta_sketch": sketches}, seed=seed)
        slots = set(selector.select(view, 3).slots.tolist())
        assert 5 not in slots
        assert len(slots & {0, 1}) == len(slots & {2, 3}) == len(slots & {4}) == 1


def test_dpp_draws_its_first_client() -> None:
    selector = fakes.build("dpp").selector
    firsts = {int(selector.select(fakes.view(selector, seed=s), 1).slots[0]) for s in range(40)}
    assert firsts == set(range(6))


def test_the_oracle_pools_the_most_even_labels() -> None:
    counts = torch.tensor([[10.0, 0, 0], [0, 10, 0], [0, 0, 10], [10, 0, 0], [0, 10, 0]])
    selector = fakes.build("oracle-balance").selector
    view = fakes.view(ids=range(5), reports={"label_histogram": counts})
    choice = selector.select(view, 3)
    assert counts[choice.slots].sum(0).tolist() == [10, 10, 10]
