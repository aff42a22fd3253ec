"""The best slots, with ties broken at random."""

from __future__ import annotations

import pytest
import torch

from fedglimpse import rng
from fedglimpse.methods.base import top_slots

VALUES = torch.tensor([-1.0, 0.0, -0.0, 2.0, torch.inf, -torch.inf, torch.nan])


@pytest.mark.parametrize("k", [0, 1, 3, 12, 20])
def test_order_is_that_of_a_stable_sort_of_shuffled_scores(k: int) -> None:
    for trial in range(50):
        draw = rng.generator(0, "scores", trial)
        scores = VALUES[torch.randint(len(VALUES), (12,), generator=draw)]
        shuffled = torch.randperm(12, generator=rng.generator(1, "ties", trial))
        comparable = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        order = torch.argsort(comparable[shuffled], descending=True, stable=True)
        slots = top_slots(scores, k, rng.generator(1, "ties", trial))
        assert slots.tolist() == shuffled[order][:k].tolist()
        assert slots.dtype == torch.int64


def test_scores_of_a_network_need_no_detaching() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0], requires_grad=True)
    assert top_slots(scores, 2, rng.generator(0, "ties")).tolist() == [1, 2]
