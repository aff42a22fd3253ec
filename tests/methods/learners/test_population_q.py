from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedglimpse.methods.learners.population_q import PopulationAgent, PopulationMemory
from fedglimpse.types import View
from mistakes import mistake

N = 6
D = 3


def agent(**changes: Any) -> PopulationAgent:
    values: dict[str, Any] = {
        "num_clients": N,
        "sketch_dim": D,
        "seed": 0,
        "features": 0,
        "hidden": 8,
        "gamma": 0.9,
        "lr": 0.01,
        "buffer": 20,
        "batch": 4,
        "sync": 3,
    }
    return PopulationAgent(**values | changes)


def view(round_num: int, ids: list[int]) -> View:
    sketch = torch.randn(D, generator=torch.Generator().manual_seed(round_num))
    return View(
        round_num=round_num,
        ids=torch.tensor(ids),
        sizes=torch.ones(len(ids), dtype=torch.int64),
        reports={},
        server={"global_sketch": sketch},
        rng=torch.Generator(),
    )


def play(one: PopulationAgent, rounds: range) -> None:
    for t in rounds:
        ids = [(t + i) % N for i in range(3)]
        chosen = torch.tensor(ids[:2])
        sketches = torch.randn(2, D, generator=torch.Generator().manual_seed(100 + t))
        one.remember(view(t, sorted(ids)), 2, chosen, torch.tensor([1.0, -1.0]), sketches)
        one.learn(t)


def test_state_is_zeros_flag_and_age_for_the_unseen() -> None:
    memory = PopulationMemory(3, 2, 4)
    memory.see(torch.tensor([1]), torch.tensor([[5.0, 6.0]]), 2)
    (state,) = memory.states(memory.latest[None], torch.tensor([[1.0, 2.0]]), torch.tensor([5]))
    expected = [1, 2, 0, 0, 5, 6, 0, 0, 0, 1, 0, 0, math.log(4), 0]
    assert state.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("capacity", [2, 3, 5])
def test_states_survive_forgetting(capacity: int) -> None:
    """A ring that forgets gives the same states as one that never had to."""
    small = agent(buffer=capacity)
    large = agent(buffer=100)
    for t in range(17):
        for one in (small, large):
            ids = torch.tensor([t % N, (t * t + 1) % N]).unique()
            sketches = torch.randn(len(ids), D, generator=torch.Generator().manual_seed(t))
            one.remember(view(t, list(range(N))), 2, ids, torch.ones(len(ids)), sketches)
    entries = torch.arange(17 - capacity, 17)
    from_small = small.memory.observe(entries)
    from_large = large.memory.observe(entries)
    assert torch.equal(from_small.states, from_large.states)
    assert len(small.memory.versions) <= 1 + N + 2 * 2 * capacity


def test_a_round_is_stored_with_what_was_known_before_it() -> None:
    one = agent()
    play(one, range(2))
    first = one.memory.observe(torch.tensor([0])).states[0]
    assert not first[D : D + N * D].any()  # nobody had been seen


def test_transitions_of_rounds_and_of_clients() -> None:
    one = agent()
    play(one, range(3))
    batch = one.transitions(torch.tensor([0, 1]))
    assert batch.chosen.sum(1).tolist() == [2, 2]
    assert batch.returns.tolist() == [0.0, 0.0]  # mean of 1 and -1
    assert batch.next_obs.mask.sum(1).tolist() == [3, 3]
    one.per_client = True
    batch = one.transitions(torch.tensor([0, 1]))
    assert batch.chosen.sum(1).tolist() == [1, 1, 1, 1]
    assert batch.returns.tolist() == [1.0, -1.0, 1.0, -1.0]  # ids 0, 1 and 1, 2
    assert batch.next_k.tolist() == [1, 1, 1, 1]
    assert torch.equal(batch.obs.rows, torch.tensor([0, 0, 1, 1]))


def test_a_round_without_a_successor_or_a_choice_is_not_learnt_from() -> None:
    one = agent()
    none = torch.zeros(0, dtype=torch.int64)
    one.remember(view(0, [0, 1]), 2, none, torch.zeros(0), torch.zeros(0, D))
    assert one.learn(0) == (None, 0)
    play(one, range(1, 3))
    assert one.memory.starts().tolist() == [1]


def test_target_follows_every_few_updates_only() -> None:
    one = agent(sync=3)
    play(one, range(3))  # two updates: the first round has no successor yet
    online = one.learner.online.layers[0]
    target = one.learner.target.layers[0]
    assert not torch.equal(online.weight, target.weight)
    play(one, range(3, 4))
    assert torch.equal(online.weight, target.weight)


def test_exact_continuation() -> None:
    uninterrupted = agent(buffer=5)
    first_half = agent(buffer=5)
    play(uninterrupted, range(20))
    play(first_half, range(11))
    resumed = agent(buffer=5)
    resumed.load_state_dict(first_half.state_dict())
    play(resumed, range(11, 20))
    seen = view(20, [0, 2, 3])
    assert torch.equal(resumed.scores(seen), uninterrupted.scores(seen))


def test_flops_of_a_forward_pass_agree_with_pytorch() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    one = agent()
    with FlopCounterMode(display=False) as counter:
        one.scores(view(0, [0, 1]))
    assert counter.get_total_flops() == one.flops


def test_too_large_a_population_names_the_fix() -> None:
    with mistake("options.features"):
        agent(num_clients=20_000, sketch_dim=128, hidden=512)
    with mistake("data.clients"):
        agent(num_clients=1_000_000, sketch_dim=128, hidden=512)


def test_stored_states_are_those_that_were_seen() -> None:
    one = agent(buffer=4)
    seen = []
    for t in range(9):
        view_of_round = view(t, [0, 1, 2, 3])
        sketch = one.narrow(view_of_round.server["global_sketch"])[None]
        seen.append(one.memory.states(one.memory.latest[None], sketch, torch.tensor([t]))[0])
        ids = torch.tensor([t % 4, (t + 1) % 4])
        sketches = torch.randn(2, D, generator=torch.Generator().manual_seed(t))
        one.remember(view_of_round, 2, ids, torch.ones(2), sketches)
    assert torch.equal(one.memory.observe(torch.arange(5, 9)).states, torch.stack(seen[5:]))
