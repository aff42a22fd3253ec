"""A written-out trajectory: returns, windows and wrap-around computed by hand."""

from __future__ import annotations

import io

import pytest
import torch

from fedglimpse.agent.memory import Replay, Round

REWARDS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def store(capacity: int = 10, n_step: int = 3, history: int = 2, **changes: object) -> Replay:
    sizes = {"features": 1, "sketch_dim": 1, "rewards": 1, "num_classes": 2, "max_visible": 2}
    return Replay(
        capacity,
        history=history,
        n_step=n_step,
        gamma=0.9,
        **(sizes | changes),  # type: ignore[arg-type]
    )


def entry(t: int, visible: int = 2, round_num: int | None = None, rewards: int = 1) -> Round:
    return Round(
        clients=torch.full((visible, 1), float(t)),
        ids=torch.arange(visible) + t,
        chosen=torch.arange(visible) == 0,
        sketch=torch.tensor([10.0 * t]),
        reward=torch.full((rewards,), REWARDS[t % len(REWARDS)]),
        histogram=torch.full((2,), torch.nan),
        round_num=t if round_num is None else round_num,
        k=1 + t,
    )


def filled(rounds: int, replay: Replay) -> Replay:
    for t in range(rounds):
        replay.add(entry(t))
    return replay


def test_three_step_return_by_hand() -> None:
    batch = filled(7, store()).gather(torch.tensor([0, 3]))
    # 1 + .9 * 2 + .81 * 3 = 5.23 and 4 + .9 * 5 + .81 * 6 = 13.36
    torch.testing.assert_close(batch.returns, torch.tensor([5.23, 13.36]))
    torch.testing.assert_close(batch.discount, torch.tensor([0.729, 0.729]))
    assert batch.next_obs.clients[:, 0, 0].tolist() == [3.0, 6.0]
    assert batch.next_k.tolist() == [4, 7]
    assert batch.chosen.tolist() == [[True, False]] * 2


def test_a_transition_needs_the_round_n_later() -> None:
    assert filled(3, store()).starts().tolist() == []
    assert filled(4, store()).starts().tolist() == [0]
    assert filled(7, store()).starts().tolist() == [0, 1, 2, 3]


def test_wrap_around_by_hand() -> None:
    replay = filled(7, store(capacity=5))  # entries 0 and 1 are overwritten
    assert replay.starts().tolist() == [2, 3]
    batch = replay.gather(torch.tensor([2, 3]))
    # 3 + .9 * 4 + .81 * 5 = 10.65 and 4 + .9 * 5 + .81 * 6 = 13.36
    torch.testing.assert_close(batch.returns, torch.tensor([10.65, 13.36]))
    assert batch.obs.history[:, :, 0].tolist()[1] == pytest.approx([60.0, 20.0, 30.0])
    assert batch.obs.history_mask.tolist() == [[False, False, True], [False, True, True]]
    assert batch.next_obs.history[:, :, 0].tolist() == [[30.0, 40.0, 50.0], [40.0, 50.0, 60.0]]
    assert batch.next_obs.history_mask.all()


def test_history_window_is_shorter_at_the_start() -> None:
    obs = filled(5, store(n_step=1)).gather(torch.tensor([0, 1, 3])).obs
    assert obs.history_mask.tolist() == [
        [False, False, True],
        [False, True, True],
        [True, True, True],
    ]
    assert obs.history[2, :, 0].tolist() == [10.0, 20.0, 30.0]


def test_a_round_without_any_used_update_is_no_action() -> None:
    replay = store(n_step=1)
    for t in range(4):
        item = entry(t)
        replay.add(item._replace(chosen=item.chosen & (t != 1)))
    assert replay.starts().tolist() == [0, 2]


def test_larger_visible_sets_widen_the_store_and_batches_are_trimmed() -> None:
    replay = store(n_step=1)
    for t, visible in enumerate([1, 2, 7, 3, 1]):
        replay.add(entry(t, visible=visible))
    batch = replay.gather(torch.tensor([0, 1]))
    assert batch.obs.mask.tolist() == [[True, False], [True, True]]
    assert batch.next_obs.mask.sum(dim=1).tolist() == [2, 7]
    assert batch.next_obs.clients[1, :, 0].tolist() == [2.0] * 7
    narrow = replay.gather(torch.tensor([3]))
    assert narrow.obs.mask.shape == (1, 3)
    assert narrow.next_obs.mask.shape == (1, 1)


def test_an_overwritten_row_keeps_nothing_of_the_old_set() -> None:
    replay = store(capacity=3, n_step=1, history=1)
    for t, visible in enumerate([4, 4, 4, 1, 1, 1]):
        replay.add(entry(t, visible=visible))
    batch = replay.gather(torch.tensor([3]))
    assert batch.obs.mask.tolist() == [[True]]
    assert replay.state_dict()["rows"]["ids"][:, 1:].sum() == 0


def test_per_class_returns() -> None:
    replay = store(rewards=2, n_step=2)
    for t in range(3):
        item = entry(t, rewards=2)
        replay.add(item._replace(reward=torch.tensor([1.0, 10.0 * t])))
    torch.testing.assert_close(replay.gather(torch.tensor([0])).returns, torch.tensor([[1.9, 9.0]]))


def test_samples_come_from_the_generator_and_do_not_repeat() -> None:
    replay = filled(9, store(n_step=1))
    draws = [
        replay.sample(6, torch.Generator().manual_seed(seed)).obs.clients[:, 0, 0].tolist()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert len(set(draws[0])) == 6
    assert len(replay.sample(99, torch.Generator()).returns) == 8


def test_state_round_trips_through_a_file() -> None:
    replay = filled(7, store(capacity=5))
    replay.add(entry(0, visible=6))
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    file.seek(0)
    again = store(capacity=5)
    again.load_state_dict(torch.load(file, weights_only=True))
    for t in range(3):
        replay.add(entry(t))
        again.add(entry(t))
    assert torch.equal(replay.starts(), again.starts())
    ours, theirs = (r.gather(r.starts()) for r in (replay, again))
    assert torch.equal(ours.returns, theirs.returns)
    assert all(torch.equal(a, b) for a, b in zip(ours.obs, theirs.obs, strict=True))
