"""A written-out trajectory: returns, windows and wrap-around computed by hand."""

from __future__ import annotations

import io
from typing import NamedTuple

import torch

from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.memory import NStepBatch, ReplayMemory, Round, Sampled

REWARDS = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


class NextRounds(NamedTuple):
    """What transitions lead to."""

    obs: Observation
    k: torch.Tensor


class OneLane:
    """The second of two lanes; the first one stays empty."""

    def __init__(self, capacity: int = 10, n_step: int = 3, history: int = 2, classes: int = 0):
        settings = AgentConfig(
            buffer=capacity, n_step=n_step, history=history, gamma=0.9, input="grad",
            q_output="per_class" if classes else "scalar",
        )  # fmt: skip
        self.memory = ReplayMemory(
            2, settings, AgentSizes(1, classes or 2, 99), torch.device("cpu")
        )

    def add(self, item: Round) -> None:
        self.memory.add({1: item})

    def starts(self) -> list[int]:
        return self.memory.starts(1).tolist()

    def sampled(self, entries: list[int]) -> Sampled:
        where = torch.tensor([entries])
        oldest = torch.from_numpy(self.memory.oldest)[1:, None]
        return Sampled(torch.ones_like(where), where, oldest, self.memory.rows["sketch"])

    def gather(self, *entries: int) -> tuple[NStepBatch, NextRounds]:
        """Return what was seen and what it led to, without the dimension for lanes."""
        width = int(self.memory.visible.max())
        sampled = self.sampled(list(entries))
        batch = self.memory.gather(sampled, width)
        later = sampled._replace(entries=sampled.entries + self.memory.config.n_step)
        later_obs = self.memory.observe(later, width)
        (k,) = self.memory.rows_of(later.lanes, later.entries, "k")
        without = NStepBatch(first_lane(batch.obs), *(tensor[0] for tensor in batch[1:]))
        return without, NextRounds(first_lane(later_obs), k[0])


def first_lane(obs: Observation) -> Observation:
    return Observation(*(tensor[0] for tensor in obs))


def entry(t: int, visible: int = 2, rewards: int = 1) -> Round:
    return Round(
        round_num=t,
        clients=torch.full((visible, 1), float(t)),
        ids=torch.arange(visible) + t,
        chosen=torch.arange(visible) == 0,
        sketch=torch.tensor([10.0 * t]),
        reward=torch.full((rewards,), REWARDS[t % len(REWARDS)]),
        histogram=torch.full((2,), torch.nan),
        k=1 + t,
    )


def filled(rounds: int, store: OneLane) -> OneLane:
    for t in range(rounds):
        store.add(entry(t))
    return store


def test_three_step_return_by_hand() -> None:
    batch, later = filled(7, OneLane()).gather(0, 3)
    # 1 + .9 * 2 + .81 * 3 = 5.23 and 4 + .9 * 5 + .81 * 6 = 13.36
    torch.testing.assert_close(batch.returns, torch.tensor([[5.23], [13.36]]))
    assert later.obs.clients[:, 0, 0].tolist() == [3.0, 6.0]
    assert later.k.tolist() == [4, 7]
    assert batch.chosen.tolist() == [[True, False]] * 2


def test_a_transition_needs_the_round_n_later() -> None:
    assert filled(3, OneLane()).starts() == []
    assert filled(4, OneLane()).starts() == [0]
    assert filled(7, OneLane()).starts() == [0, 1, 2, 3]


def test_wrap_around_by_hand() -> None:
    replay = filled(8, OneLane(capacity=6))  # entries 0 and 1 are overwritten
    assert replay.starts() == [2, 3, 4]
    batch, later = replay.gather(2, 3)
    # 3 + .9 * 4 + .81 * 5 = 10.65 and 4 + .9 * 5 + .81 * 6 = 13.36
    torch.testing.assert_close(batch.returns, torch.tensor([[10.65], [13.36]]))
    assert batch.obs.history_mask.tolist() == [[False, False, True], [False, True, True]]
    assert later.obs.history[:, :, 0].tolist() == [[30.0, 40.0, 50.0], [40.0, 50.0, 60.0]]
    assert later.obs.history_mask.all()


def test_history_window_is_shorter_at_the_start() -> None:
    obs = filled(5, OneLane(n_step=1)).gather(0, 1, 3)[0].obs
    assert obs.history_mask.tolist() == [
        [False, False, True],
        [False, True, True],
        [True, True, True],
    ]
    assert obs.history[2, :, 0].tolist() == [10.0, 20.0, 30.0]


def test_a_round_without_any_used_update_is_no_action() -> None:
    replay = OneLane(n_step=1)
    for t in range(4):
        item = entry(t)
        replay.add(item._replace(chosen=item.chosen & (t != 1)))
    assert replay.starts() == [0, 2]


def test_larger_visible_sets_widen_the_store_keeping_what_was_there() -> None:
    replay = OneLane(n_step=1)
    for t, visible in enumerate([1, 2, 7, 3, 1]):
        replay.add(entry(t, visible=visible))
    batch, later = replay.gather(0, 1)
    assert batch.obs.mask[:, :2].tolist() == [[True, False], [True, True]]
    assert not batch.obs.mask[:, 2:].any()
    assert later.obs.mask.sum(dim=1).tolist() == [2, 7]
    assert later.obs.clients[1, :, 0].tolist() == [2.0] * 7
    assert replay.memory.visible[1, :5].tolist() == [1, 2, 7, 3, 1]


def test_an_overwritten_row_keeps_nothing_of_the_old_set() -> None:
    replay = OneLane(capacity=3, n_step=1, history=1)
    for t, visible in enumerate([4, 4, 4, 1, 1, 1]):
        replay.add(entry(t, visible=visible))
    batch, _ = replay.gather(3)
    assert batch.obs.mask.sum().item() == 1
    assert replay.memory.state_dict(1)["rows"]["ids"][:, 1:].sum() == 0


def test_per_class_returns() -> None:
    replay = OneLane(classes=2, n_step=2)
    for t in range(3):
        item = entry(t, rewards=2)
        replay.add(item._replace(reward=torch.tensor([1.0, 10.0 * t])))
    returns = replay.gather(0)[0].returns
    torch.testing.assert_close(returns, torch.tensor([[1.9, 9.0]]))


def test_lanes_remember_their_own_rounds() -> None:
    store = OneLane(n_step=1)
    store.memory.add({0: entry(5), 1: entry(0)})
    store.memory.add({0: entry(6)})
    store.memory.add({1: entry(1), 0: entry(3)})
    assert store.memory.count.tolist() == [3, 2]
    assert store.memory.rows["k"][:, :3].tolist() == [[6, 7, 4], [1, 2, 0]]


def test_state_of_a_lane_round_trips_through_a_file() -> None:
    replay = filled(7, OneLane(capacity=6))
    replay.add(entry(0, visible=20))  # wider than a new store
    file = io.BytesIO()
    torch.save(replay.memory.state_dict(1), file)
    file.seek(0)
    again = OneLane(capacity=6)
    again.memory.load_state_dict(1, torch.load(file, weights_only=True))
    for t in range(3):
        replay.add(entry(t))
        again.add(entry(t))
    assert replay.starts() == again.starts()
    ours, theirs = (store.gather(*store.starts())[0] for store in (replay, again))
    assert torch.equal(ours.returns, theirs.returns)
    assert all(torch.equal(a, b) for a, b in zip(ours.obs, theirs.obs, strict=True))
    assert again.memory.count.tolist() == [0, 11]
