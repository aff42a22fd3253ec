from __future__ import annotations

import pytest
import torch

import fakes
from fedglimpse.methods.fedawe import Echo, Options


def test_the_worked_example() -> None:
    echo = Echo(2, Options(clip=0.0))
    echo.last = torch.tensor([6, 4])  # in round 7: away for 1 and 3 rounds
    starts = torch.tensor([[1.0], [0.0]])
    deltas = torch.tensor([[-0.2], [0.1]])
    new = echo.step(torch.zeros(1), fakes.update(deltas, starts=starts, round_num=7))
    assert new.item() == pytest.approx(0.55)
    assert echo.last.tolist() == [7, 7]


def test_clients_start_where_they_left_off() -> None:
    echo = Echo(3, Options(clip=0.0))
    state = torch.tensor([1.0, 2.0])
    assert echo.starts(state, torch.tensor([0, 2])).tolist() == [[1, 2], [1, 2]]
    for t, ids in enumerate([[0, 1], [1], [1]]):
        starts = echo.starts(state, torch.tensor(ids))
        update = fakes.update(torch.ones(len(ids), 2), ids=ids, starts=starts, round_num=t)
        state = echo.step(state, update)
    assert state.tolist() == [4, 5]
    assert echo.starts(state, torch.tensor([0, 1, 2])).tolist() == [[2, 3], [4, 5], [1, 2]]
    assert sorted(echo.models) == [-1, 0, 2]  # a model nobody holds is forgotten


def test_absence_counts_from_one_and_grows() -> None:
    for round_num, last, expected in [(0, -1, 1), (4, -1, 5), (4, 3, 1)]:
        echo = Echo(1, Options(clip=0.0))
        echo.last[0] = last
        echo.models = {last: torch.zeros(1)}
        new = echo.step(torch.zeros(1), fakes.update(torch.ones(1, 1), round_num=round_num))
        assert new.item() == expected


def test_the_clip_bounds_the_mean_echo() -> None:
    def step(options: Options) -> torch.Tensor:
        deltas = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
        return Echo(2, options).step(torch.zeros(2), fakes.update(deltas))

    assert step(Options()).tolist() == pytest.approx([0.3, 0.4])
    assert step(Options(server_lr=2.0)).tolist() == pytest.approx([0.6, 0.8])
    assert step(Options(clip=10.0)).tolist() == pytest.approx([3, 4])


def test_full_participation_is_uniform_fedavg() -> None:
    method = fakes.build("fedawe", options__everyone=True, options__clip=0.0)
    state = torch.randn(fakes.STATE, generator=torch.Generator().manual_seed(0))
    for t in range(3):
        update = fakes.random_update(method, state, t, range(fakes.N))
        expected = state + update.deltas.mean(0)
        state = method.aggregator.step(state, update)
        torch.testing.assert_close(state, expected)


def test_buffers_are_not_echoed() -> None:
    echo = Echo(1, Options(clip=0.0))
    starts = torch.tensor([[0.0, 1.0]])
    deltas = torch.tensor([[0.1, -0.9]])
    new = echo.step(starts[0], fakes.update(deltas, starts=starts, round_num=9, num_params=1))
    assert new.tolist() == pytest.approx([1.0, 0.1])  # ten rounds of 0.1, a variance of 0.1
