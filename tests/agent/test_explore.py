from __future__ import annotations

import pytest
import torch

from fedglimpse.agent.explore import pick

Q = torch.tensor([0.1, 0.9, 0.5, 0.7, 0.3, 0.2])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_greedy_takes_the_best() -> None:
    picked = pick(Q, 3, 0.0, "all", 2, seeded(0))
    assert picked.slots.tolist() == [1, 3, 2]
    assert (picked.behaviour, picked.greedy_share) == ("greedy", 1.0)


def test_exploring_all_draws_every_slot_alike() -> None:
    counts = torch.zeros(6)
    for seed in range(600):
        picked = pick(Q, 2, 1.0, "all", 2, seeded(seed))
        assert (picked.behaviour, picked.greedy_share) == ("explore", 0.0)
        assert len(set(picked.slots.tolist())) == 2
        counts[picked.slots] += 1
    assert (counts / 600 - 1 / 3).abs().max() < 0.07


def test_partial_keeps_the_best_and_draws_the_rest_among_the_others() -> None:
    drawn = set()
    for seed in range(60):
        picked = pick(Q, 4, 1.0, "partial", 2, seeded(seed))
        slots = picked.slots.tolist()
        assert slots[:2] == [1, 3]
        assert len(set(slots)) == 4
        assert (picked.behaviour, picked.greedy_share) == ("partial", 0.5)
        drawn |= set(slots[2:])
    assert drawn == {0, 2, 4, 5}


def test_partial_with_a_budget_below_m_is_all_random() -> None:
    seen = {pick(Q, 1, 1.0, "partial", 2, seeded(seed)).slots.item() for seed in range(80)}
    assert seen == set(range(6))


@pytest.mark.parametrize("rule", ["all", "partial"])
@pytest.mark.parametrize("eps", [0.0, 1.0])
@pytest.mark.parametrize("visible", [1, 2, 3])
def test_fewer_visible_than_k_takes_them_all(rule: str, eps: float, visible: int) -> None:
    picked = pick(Q[:visible], 5, eps, rule, 2, seeded(1))
    assert sorted(picked.slots.tolist()) == list(range(visible))


def test_ties_fall_by_the_generator_not_by_index() -> None:
    def best(seed: int) -> int:
        return int(pick(torch.zeros(5), 1, 0.0, "all", 2, seeded(seed)).slots)

    first = [best(seed) for seed in range(50)]
    assert set(first) == set(range(5))
    assert first == [best(seed) for seed in range(50)]


def test_epsilon_is_the_share_of_exploring_rounds() -> None:
    explored = sum(pick(Q, 2, 0.3, "all", 2, seeded(s)).behaviour == "explore" for s in range(1000))
    assert 250 < explored < 350
