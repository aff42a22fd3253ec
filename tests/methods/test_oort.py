from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fakes
from fedglimpse.methods.oort import Oort, Options
from fedglimpse.types import Choice

EVEN = torch.full((12,), 10)


def tried(utilities: dict[int, float], last: dict[int, int] | None = None) -> Oort:
    selector = Oort(EVEN, Options())
    for client, utility in utilities.items():
        selector.utility[client] = utility
        selector.last_round[client] = (last or {}).get(client, 1)
    return selector


def test_utility_is_size_times_root_mean_squared_loss() -> None:
    selector = Oort(torch.tensor([5, 2]), Options())
    view = fakes.view(ids=[1], sizes=torch.tensor([5, 2]))
    outcome = fakes.outcome(selector, view, Choice(torch.tensor([0])))
    root = math.sqrt((3**2 + 4**2) / 2)
    selector.feedback(replace(outcome, reports={"rms_loss": torch.tensor([root])}))
    assert selector.utility[1].item() == pytest.approx(7.0711, abs=1e-4)
    assert selector.last_round[1] == 1
    assert selector.utility[0].isnan()


def test_the_worked_scores() -> None:
    selector = tried({0: 10, 1: 20, 2: 30}, {0: 5, 1: 2, 2: 9})
    scores = selector.scores(torch.tensor([0, 1, 2]), 10)
    assert scores.tolist() == pytest.approx([0.2151, 0.8396, 1.1600], abs=1e-4)


def test_extreme_utilities_are_clipped() -> None:
    selector = Oort(torch.full((100,), 10), Options())
    selector.utility[:] = torch.arange(100).double() + 1
    selector.utility[99] = 1e6
    selector.last_round[:] = 1
    scores = selector.scores(torch.arange(100), 1)
    assert scores[99] == scores[98]  # the element at 0.98 of the sorted list


def test_early_rounds_explore_and_late_rounds_exploit() -> None:
    selector = tried(dict.fromkeys(range(6), 10.0))

    def num_exploited(round_num: int) -> int:
        view = fakes.view(ids=range(12), sizes=EVEN, round_num=round_num)
        return int((selector.select(view, 5).slots < 6).sum())

    assert num_exploited(0) == 0  # explores 0.9 * 0.95 of 5 slots: exploits floor(0.725)
    assert num_exploited(200) == 4  # explores at least a fifth


def test_everybody_tried_means_no_exploration() -> None:
    selector = tried({i: 100.0 if i < 3 else 0.001 for i in range(12)})
    for seed in range(10):
        view = fakes.view(ids=range(12), sizes=EVEN, round_num=50, seed=seed)
        assert len(set(selector.select(view, 3).slots.tolist())) == 3
    assert sorted(selector.select(fakes.view(ids=[7, 9], sizes=EVEN), 5).slots.tolist()) == [0, 1]


def test_few_tried_clients_leave_their_slots_to_others() -> None:
    selector = tried({0: 10.0})
    view = fakes.view(ids=[0, 4], sizes=EVEN, round_num=100)
    assert sorted(selector.select(view, 5).slots.tolist()) == [0, 1]
    view = fakes.view(ids=range(8), sizes=EVEN, round_num=100)
    slots = selector.select(view, 5).slots.tolist()
    assert len(set(slots)) == 5
    assert 0 in slots  # exploits all it knows, the rest are untried


def test_untried_clients_are_drawn_by_size() -> None:
    sizes = torch.tensor([10, 30, 60])
    hits = torch.zeros(3)
    for seed in range(3_000):
        slots = Oort(sizes, Options()).select(fakes.view(ids=range(3), sizes=sizes, seed=seed), 1)
        hits[slots.slots] += 1
    torch.testing.assert_close(hits / 3_000, sizes / 100, atol=0.03, rtol=0)
