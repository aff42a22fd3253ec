from __future__ import annotations

import pytest
import torch

import fakes
from fedglimpse.federation.aggregation import weighted_delta


def test_models_are_averaged_by_size_or_evenly() -> None:
    state = torch.tensor([1.0])
    deltas = torch.tensor([[1.0], [3.0]])  # models 2 and 4
    by_size = fakes.update(deltas, weights=[0.25, 0.75])  # 100 and 300 examples
    assert weighted_delta(state, by_size).item() == pytest.approx(3.5)
    assert weighted_delta(state, fakes.update(deltas)).item() == pytest.approx(3.0)


def test_the_result_does_not_depend_on_the_order_of_clients() -> None:
    deltas = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    weights = [0.1, 0.2] * 2
    forward = weighted_delta(torch.zeros(5), fakes.update(deltas, weights=weights))
    backward = weighted_delta(torch.zeros(5), fakes.update(deltas.flip(0), weights=weights[::-1]))
    torch.testing.assert_close(forward, backward)


def test_every_client_is_included_equally_often() -> None:
    selector = fakes.build("fedavg").selector
    hits = torch.zeros(10)
    for draw in range(10_000):
        choice = selector.select(fakes.view(ids=range(10), seed=draw), 5)
        hits[choice.slots] += 1
        assert choice.weights is None  # by size
    assert ((hits / 10_000 - 0.5).abs() < 0.015).all()


def test_fewer_visible_than_k_are_all_taken() -> None:
    choice = fakes.build("fedavg").selector.select(fakes.view(ids=[4, 7]), 5)
    assert sorted(choice.slots.tolist()) == [0, 1]
