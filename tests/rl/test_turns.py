from __future__ import annotations

import pytest
import torch

from fedglimpse.rl.turns import Turns

IDS = torch.tensor([3, 5, 9])
Q = torch.tensor([1.0, 1.1, 0.9])  # spread 0.0816


def used(weight: float = 1.0, loss: str = "smooth_l1", td_loss: float | None = 0.005) -> Turns:
    """Client 3 was chosen three times, 5 once and 9 twice: the mean is 2."""
    turns = Turns(weight, loss)
    for ids in ([3, 5, 9], [3, 9], [3]):
        turns.chosen(torch.tensor(ids))
    if td_loss is not None:
        turns.learnt(td_loss)
    return turns


def test_by_hand() -> None:
    """Error 2 * 0.005 = 0.1^2 exceeds the spread: weight 0.1; turns (2 - n) / sqrt(3)."""
    gain = torch.tensor([-1.0, 1.0, 0.0]) / 3**0.5 * 0.1
    torch.testing.assert_close(used().scores(Q, IDS), Q + gain)
    squares = used(loss="mse", td_loss=0.01)
    torch.testing.assert_close(squares.scores(Q, IDS), Q + gain)


def test_where_q_tells_clients_apart_turns_vanish() -> None:
    clear = 10 * Q  # spread 0.816, error 0.1: weight 0.1 * 0.1 / 0.816
    gain = torch.tensor([-1.0, 1.0, 0.0]) / 3**0.5 * 0.01 / float(clear.std(correction=0))
    torch.testing.assert_close(used().scores(clear, IDS), clear + gain)


def test_a_turn_is_bounded_however_long_one_waits() -> None:
    turns = used()
    for _ in range(1000):
        turns.chosen(torch.tensor([3, 9]))
    gain = turns.scores(Q, IDS) - Q
    torch.testing.assert_close(gain, torch.tensor([-0.1, 0.1, -0.1]))


@pytest.mark.parametrize("turns", [used(weight=0.0), used(td_loss=None)], ids=["off", "no lesson"])
def test_q_is_left_as_it_is(turns: Turns) -> None:
    assert turns.scores(Q, IDS) is Q


def test_equal_q_and_equal_times_stay_ties() -> None:
    turns = Turns(1.0, "mse")
    turns.learnt(0.01)
    assert len(set(turns.scores(torch.ones(3), IDS).tolist())) == 1


def test_state_round_trips() -> None:
    one, other = used(), Turns(1.0, "smooth_l1")
    one.learnt(0.5)
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other.scores(Q, IDS), one.scores(Q, IDS))
    other.learnt(0.1)
    assert other.error == pytest.approx(0.9 * (0.9 * 0.01 + 0.1 * 1.0) + 0.1 * 0.2)
