from __future__ import annotations

import pytest
import torch

from fedglimpse.agent.starts import Starts

IDS = torch.tensor([3, 5, 9])
Q = torch.tensor([1.0, 1.1, 0.9])  # spread 0.0816


def used(weight: float = 1.0, loss: str = "smooth_l1", td_loss: float | None = 0.005) -> Starts:
    """Client 3 was chosen three times, 5 once and 9 twice: the mean is 2."""
    turns = Starts(weight, 0.0, loss)
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
def test_q_is_left_as_it_is(turns: Starts) -> None:
    assert turns.scores(Q, IDS) is Q


def test_equal_q_and_equal_times_stay_ties() -> None:
    turns = Starts(1.0, 0.0, "mse")
    turns.learnt(0.01)
    assert len(set(turns.scores(torch.ones(3), IDS).tolist())) == 1


def test_whom_the_model_fits_worst_gets_a_start() -> None:
    """Losses 1, 2, 3 standardised are -1.2247, 0, 1.2247; the weight is 0.1 as above."""
    starts = Starts(0.0, 2.0, "smooth_l1")
    lean = starts.lean(torch.tensor([1.0, 2.0, 3.0]))
    assert lean is not None
    torch.testing.assert_close(lean, 2 * torch.tensor([-1.0, 0.0, 1.0]) * 1.5**0.5)
    assert starts.scores(Q, IDS, lean) is Q  # before the first lesson
    starts.learnt(0.005)
    torch.testing.assert_close(starts.scores(Q, IDS, lean), Q + 0.1 * lean)


def test_turns_and_lean_add_up() -> None:
    both = used()
    both.loss_lean = 1.0
    lean = both.lean(torch.tensor([1.0, 2.0, 3.0]))
    assert lean is not None
    torch.testing.assert_close(both.scores(Q, IDS, lean), used().scores(Q, IDS) + 0.1 * lean)


def test_nobody_leans_without_a_weight_or_a_report_and_a_diverged_client_counts_as_zero() -> None:
    assert used().lean(torch.ones(3)) is None
    starts = Starts(0.0, 1.0, "mse")
    assert starts.lean(None) is None
    broken, zero = (starts.lean(torch.tensor([x, 2.0, 3.0])) for x in (torch.nan, 0.0))
    assert broken is not None
    assert zero is not None
    assert broken.tolist() == zero.tolist()


def test_state_round_trips() -> None:
    one, other = used(), Starts(1.0, 0.0, "smooth_l1")
    one.learnt(0.5)
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other.scores(Q, IDS), one.scores(Q, IDS))
    other.learnt(0.1)
    assert other.error == pytest.approx(0.9 * (0.9 * 0.01 + 0.1 * 1.0) + 0.1 * 0.2)
