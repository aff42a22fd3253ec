from __future__ import annotations

import torch

import fakes


def test_the_highest_losses_are_chosen() -> None:
    selector = fakes.build("power-of-choice", options__candidates=3).selector
    view = fakes.view(ids=[3, 5, 8], reports={"loss": torch.tensor([0.2, 0.9, 0.5])})
    choice = selector.select(view, 2)
    assert choice.slots.tolist() == [1, 2]
    assert choice.weights is not None
    assert choice.weights.tolist() == [0.5, 0.5]


def test_as_many_candidates_as_slots_is_sampling_by_size() -> None:
    selector = fakes.build("power-of-choice", options__candidates=1).selector
    sizes = fakes.SIZES
    hits = torch.zeros(4)
    for seed in range(4_000):
        losses = {"loss": torch.tensor([4.0, 3, 2, 1])}
        hits[selector.select(fakes.view(ids=range(4), reports=losses, seed=seed), 1).slots] += 1
    torch.testing.assert_close(hits / 4_000, sizes[:4] / sizes[:4].sum(), atol=0.025, rtol=0)


def test_only_candidates_can_be_chosen() -> None:
    selector = fakes.build("power-of-choice", options__candidates=2).selector
    losses = {"loss": torch.tensor([9.0, 1, 1, 1, 1, 1])}
    hits = sum(
        int(0 in selector.select(fakes.view(reports=losses, seed=s), 1).slots) for s in range(200)
    )
    assert 0 < hits < 150


def test_weights_by_size_and_small_views() -> None:
    selector = fakes.build("power-of-choice", options__weights="size").selector
    choice = selector.select(fakes.view(ids=[2], reports={"loss": torch.tensor([1.0])}), 5)
    assert choice.slots.tolist() == [0]
    assert choice.weights is None
