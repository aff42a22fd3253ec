from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fakes
from fedglimpse.methods.f3ast import Options, RateTracker
from fedglimpse.types import Choice

RATES = torch.tensor([0.2, 0.1, 0.4, 0.1, 0.2], dtype=torch.float64)
EVEN = torch.full((5,), 10)


def tracker(**options: object) -> RateTracker:
    selector = RateTracker(EVEN, 2, Options(**{"beta": 0.1, **options}))  # type: ignore[arg-type]
    selector.rates = RATES.clone()
    return selector


def weights_by_id(choice: Choice, ids: list[int]) -> dict[int, float]:
    assert choice.weights is not None
    return {ids[s]: w for s, w in zip(choice.slots.tolist(), choice.weights.tolist(), strict=True)}


def example(**options: object) -> tuple[dict[int, float], Tensor]:
    selector = tracker(**options)
    ids = [0, 2, 3]
    choice = selector.select(fakes.view(ids=ids, sizes=EVEN), 2)
    return weights_by_id(choice, ids), selector.rates


def test_the_worked_example() -> None:
    weights, rates = example()
    assert weights == pytest.approx({3: 2.0, 0: 1.0})
    assert rates.tolist() == pytest.approx([0.28, 0.09, 0.36, 0.19, 0.18])
    assert rates.sum().item() == pytest.approx(1.1)
    assert example(mode="normalised")[0] == pytest.approx({3: 0.6667, 0: 0.3333}, abs=1e-4)
    assert example(rate="after")[0] == pytest.approx({3: 1.0526, 0: 0.7143}, abs=1e-4)
    after = example(rate="after", mode="normalised")[0]
    assert after == pytest.approx({3: 0.5957, 0: 0.4043}, abs=1e-4)


def test_the_largest_scores_come_first() -> None:
    selector = tracker()
    view = fakes.view(ids=[0, 2, 3], sizes=EVEN)
    assert view.ids[selector.select(view, 2).slots].tolist() == [3, 0]  # scores 1, 0.25, 4


def test_weights_can_be_clipped_and_scaled() -> None:
    assert example(clip=3.0)[0] == pytest.approx({3: 1.5, 0: 1.0})  # 3 / K
    assert example(server_lr=0.5)[0] == pytest.approx({3: 1.0, 0: 0.5})


def test_fewer_visible_than_k() -> None:
    selector = tracker()
    choice = selector.select(fakes.view(ids=[4], sizes=EVEN), 2)
    assert choice.slots.tolist() == [0]
    assert selector.rates[4].item() == pytest.approx(0.28)


def test_weights_sum_to_one_in_the_first_round() -> None:
    for seed in range(5):
        selector = RateTracker(fakes.SIZES, 3, Options())
        choice = selector.select(fakes.view(ids=range(8), seed=seed), 3)
        assert choice.weights is not None
        assert choice.weights.sum().item() == pytest.approx(1)


def test_the_sum_of_rates_tends_to_k() -> None:
    selector = RateTracker(EVEN, 1, Options(beta=0.05))
    selector.rates = torch.full((5,), 0.02, dtype=torch.float64)
    for t in range(300):
        selector.select(fakes.view(ids=[t % 5, (t + 1) % 5], sizes=EVEN, round_num=t), 1)
    assert selector.rates.sum().item() == pytest.approx(1, abs=1e-5)


def test_ties_in_the_first_round_are_broken_at_random() -> None:
    firsts = set()
    for seed in range(20):
        view = fakes.view(ids=range(5), sizes=EVEN, seed=seed)
        firsts.add(int(RateTracker(EVEN, 2, Options()).select(view, 2).slots[0]))
    assert firsts == set(range(5))


def test_the_aggregate_is_unbiased_under_uneven_availability() -> None:
    """The mean of omega_i [i chosen] is p_i, for clients that are seen from 15 % to 90 %."""
    sizes = torch.tensor([10, 20, 30, 40, 50, 10, 20, 30, 40, 50])
    seen_with = torch.tensor([0.9, 0.9, 0.6, 0.6, 0.5, 0.5, 0.4, 0.3, 0.2, 0.15])
    selector = RateTracker(sizes, 3, Options(beta=0.01))
    draw = torch.Generator().manual_seed(1)
    total = torch.zeros(10).double()
    plain = torch.zeros(10).double()
    warm = 1_000
    rounds = 9_000
    for t in range(rounds):
        ids = (torch.rand(10, generator=draw) < seen_with).nonzero().flatten().tolist() or [0]
        choice = selector.select(fakes.view(ids=ids, sizes=sizes, round_num=t), 3)
        if t >= warm and choice.weights is not None:
            at = torch.tensor(ids)[choice.slots]
            total[at] += choice.weights / (rounds - warm)
            plain[at] += sizes[at] / sizes[at].sum() / (rounds - warm)
    share = sizes / sizes.sum()
    assert (total / share - 1).abs().max() < 0.1
    assert (plain / share - 1).abs().max() > 0.2  # an average by size is not
    deltas = torch.arange(10).double() ** 2
    assert (total @ deltas).item() == pytest.approx((share.double() @ deltas).item(), rel=0.05)


def test_presets_and_options() -> None:
    selector = fakes.build("f3ast").selector
    assert isinstance(selector, RateTracker)
    assert selector.options == Options("unbiased", 0.001, "before", 0.0, 1.0)
    released = fakes.build("f3ast", preset="released").selector
    assert isinstance(released, RateTracker)
    assert released.options.mode == "normalised"


def test_ties_are_ties_whatever_the_sizes() -> None:
    sizes = torch.randint(281, 410, (21,), generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(21)
    for seed in range(400):
        selector = RateTracker(sizes, 5, Options())
        for round_num in range(2):  # the second among those that were not chosen in the first
            seen = fakes.view(ids=range(21), sizes=sizes, round_num=round_num, seed=seed)
            counts[selector.select(seen, 5).slots] += 1
    expected = 2 * 400 * 5 / 21
    assert ((counts - expected).abs() < 5 * expected**0.5).all(), counts
