from __future__ import annotations

import pytest
import torch

import fakes
from fedglimpse.methods.mifa import Options, UpdateMemory

LR = 0.1
GRADIENTS = [0.4, -0.2, 0.6]
DELTAS = [torch.tensor([[-LR * g]]) for g in GRADIENTS]


def after(seen: int, **options: object) -> float:
    """Return the model after the first `seen` clients sent their memory in one round, from 1."""
    memory = UpdateMemory(3, Options(**options))  # type: ignore[arg-type]
    return memory.step(torch.ones(1), fakes.update(torch.cat(DELTAS[:seen]))).item()


def test_the_worked_example() -> None:
    assert after(3) == pytest.approx(0.97333, abs=1e-5)
    assert after(2) == pytest.approx(0.99)
    assert after(2, average="all") == pytest.approx(0.99333, abs=1e-5)
    assert after(2, wait=True) == 1.0
    assert after(3, wait=True) == pytest.approx(0.97333, abs=1e-5)


def test_memories_stay_until_they_are_replaced_or_too_old() -> None:
    def two_rounds(later: int, max_age: int) -> float:
        memory = UpdateMemory(2, Options(max_age=max_age))
        state = memory.step(torch.zeros(1), fakes.update(torch.tensor([[1.0]]), ids=[0]))
        second = fakes.update(torch.tensor([[3.0]]), ids=[1], round_num=later)
        return memory.step(state, second).item()

    assert two_rounds(later=5, max_age=0) == 1 + 2  # the mean of 1 and 3
    assert two_rounds(later=5, max_age=5) == 1 + 2
    assert two_rounds(later=6, max_age=5) == 1 + 3


def test_full_participation_is_uniform_fedavg() -> None:
    method = fakes.build("mifa", options__everyone=True)
    state = torch.randn(fakes.STATE, generator=torch.Generator().manual_seed(0))
    for t in range(3):
        update = fakes.random_update(method, state, t, range(fakes.N))
        expected = state + update.deltas.mean(0)
        state = method.aggregator.step(state, update)
        torch.testing.assert_close(state, expected)
    view = fakes.view(ids=range(fakes.N))
    choice = method.selector.select(view, method.budget(3, view.num_visible))
    assert sorted(choice.slots.tolist()) == list(range(fakes.N))


def test_buffers_are_this_rounds_and_never_negative() -> None:
    memory = UpdateMemory(2, Options())
    state = torch.tensor([0.0, 1.0])  # a variance of 1
    for t in range(40):  # the same client halves the variance again and again
        delta = torch.tensor([[0.1, -0.5 * float(state[1])]])
        state = memory.step(state, fakes.update(delta, ids=[0], num_params=1, round_num=t))
        assert state[1] > 0


def test_clients_without_data_are_not_waited_for() -> None:
    sizes = torch.tensor([5, 0, 5, 5])
    method = fakes.build("mifa", sizes, options__wait=True)
    update = fakes.update(torch.ones(3, 2), ids=[0, 2, 3])
    assert (method.aggregator.step(torch.zeros(2), update) == 1).all()
