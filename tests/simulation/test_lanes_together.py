"""Lanes that aggregate in one pass against `Aggregator.step`, the readable twin."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import small_world as small
import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.federation.aggregation import TemporalWindow, WeightedDelta, batch_key
from fedglimpse.methods.fedawac import ConsistencyWindow, Options
from fedglimpse.simulation.lane import (
    Lane,
    LaneRound,
    TrainedClients,
    deltas_of,
    pick_each,
    states_of,
    step_alone,
    step_together,
)
from fedglimpse.types import Method

R, K, SIZE, PARAMS = 4, 3, 50, 41
KINDS = {
    "plain": WeightedDelta(),
    "smoothed": TemporalWindow(4, "smoothed"),
    "raw": TemporalWindow(4, "raw"),
    "window of one": TemporalWindow(1, "smoothed"),
}


@dataclass
class Upload:
    """The updates of one lane in a round."""

    clients: TrainedClients
    round: LaneRound


def upload(state: Tensor, draw: torch.Generator, own_starts: bool, weights: Tensor) -> Upload:
    starts = state.expand(K, -1)
    if own_starts:
        starts = starts + torch.rand(K, SIZE, generator=draw)
    states = starts + torch.randn(K, SIZE, generator=draw)
    losses = torch.rand(2, K, generator=draw)
    ids = torch.arange(K)
    clients = TrainedClients(ids, starts, states, *losses)
    examples = dict.fromkeys(range(K), 1)
    now = LaneRound(0, examples, ids, torch.ones(K).long(), passes=False, weights=weights)
    return Upload(clients, now)


def uploads(states: Tensor, round_num: int, own_starts: bool = False) -> list[Upload]:
    """One upload for each lane; the weights of the first sum to 0, those of others to anything."""
    draw = rng.generator(0, "merge", round_num)
    weights = torch.rand(len(states), K, generator=draw, dtype=torch.float64) * 2
    weights[0] = 0
    pairs = zip(states, weights, strict=True)
    return [upload(state, draw, own_starts, lane_weights) for state, lane_weights in pairs]


def lanes(kind: str) -> list[Lane]:
    return [small.lane(Method(small.Fixed([0]), copy.deepcopy(KINDS[kind]))) for _ in range(R)]


def aggregators(lanes: Sequence[Lane]) -> list[WeightedDelta]:
    result = [lane.method.aggregator for lane in lanes]
    assert all(isinstance(aggregator, WeightedDelta) for aggregator in result)
    return result  # type: ignore[return-value]


def stepped(lanes: Sequence[Lane], states: Tensor, uploads: Sequence[Upload]) -> Tensor:
    """Step lanes in one pass; returns the next states."""
    rounds = [one.round for one in uploads]
    return step_together(lanes, rounds, states, [one.clients for one in uploads], PARAMS)


@pytest.mark.parametrize("own_starts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_together_is_what_each_does_alone(kind: str, own_starts: bool) -> None:
    together = lanes(kind)
    alone = lanes(kind)
    states = torch.randn(R, SIZE, generator=rng.generator(0, "states"))
    singly = states.clone()
    for round_num in range(6):
        assert len({batch_key(one) for one in aggregators(together)}) == 1
        for r, one in enumerate(uploads(singly, round_num, own_starts)):
            step_alone(alone[r], one.round, singly[r], one.clients, PARAMS)
        states = stepped(together, states, uploads(states, round_num, own_starts))
        torch.testing.assert_close(states, singly, rtol=1e-5, atol=1e-5)
    for batched, single in zip(aggregators(together), aggregators(alone), strict=True):
        torch.testing.assert_close(batched.state_dict(), single.state_dict(), rtol=1e-5, atol=1e-5)


def test_a_lane_finds_the_same_bits_whoever_steps_with_it() -> None:
    many = lanes("smoothed")
    one = lanes("smoothed")[:1]
    states = torch.randn(R, SIZE, generator=rng.generator(0, "states"))
    single = states[1:2].clone()
    for round_num in range(6):
        updates = uploads(states, round_num)
        single = stepped(one, single, updates[1:2])
        states = stepped(many, states, updates)
        assert torch.equal(single[0], states[1])


def test_what_differs_does_not_step_in_one_pass() -> None:
    begun = TemporalWindow(4, "raw")
    begun.past.append(torch.zeros(SIZE))
    others = [*KINDS.values(), begun]
    assert len({batch_key(one) for one in others}) == len(others)
    for subclass in (small.Watching(), ConsistencyWindow(Options(), 3)):
        assert batch_key(subclass) is None


def test_a_saved_window_holds_its_own_models_only() -> None:
    windows = lanes("smoothed")
    states = torch.zeros(R, SIZE)
    stepped(windows, states, uploads(states, 0))
    saved = io.BytesIO()
    torch.save(windows[0].method.aggregator.state_dict()["past"], saved)
    saved.seek(0)
    kept = torch.load(saved, weights_only=True)
    assert kept[0].untyped_storage().nbytes() == 4 * SIZE


@pytest.mark.parametrize("floats", [2**27, 2 * 3 * 51, 1])
def test_rounds_in_one_pass_give_what_a_cpu_gives(
    monkeypatch: pytest.MonkeyPatch, floats: int
) -> None:
    """Every group of lanes, in passes of any size; one lane has an aggregator class of its own."""

    def world() -> small.World:
        kinds = [KINDS["smoothed"], KINDS["smoothed"], KINDS["plain"], small.Watching()]
        slots = [[0, 1, 2], [3, 1, 2], [4, 0], [1, 2]]
        return small.world(
            [
                small.lane(Method(small.Fixed(chosen), copy.deepcopy(kind)), seed=seed)
                for seed, (kind, chosen) in enumerate(zip(kinds, slots, strict=True))
            ]
        )

    ours, theirs = world(), world()
    for _ in range(4):
        expected = small.run_round(theirs)
        monkeypatch.setattr("fedglimpse.federation.devices.SEPARATE_LANES", ())
        monkeypatch.setattr("fedglimpse.simulation.world.LARGEST_PASS", floats)
        found = small.run_round(ours)
        monkeypatch.undo()
        torch.testing.assert_close(ours.states, theirs.states, rtol=1e-5, atol=1e-5)
        assert [r["selected"] for r in found] == [r["selected"] for r in expected]
        assert [r["weights"] for r in found] == [r["weights"] for r in expected]


def test_picks_of_several_lanes_are_those_of_each() -> None:
    states = torch.randn(3, SIZE, generator=rng.generator(0, "states"))
    clients = [one.clients for r in range(3) for one in uploads(states, r, own_starts=r == 1)[:1]]
    slots = [torch.tensor(some, dtype=torch.long) for some in ([2, 0], [1], [])]
    for before, places, after in zip(clients, slots, pick_each(clients, slots), strict=True):
        for name, value in vars(before).items():
            assert torch.equal(getattr(after, name), value[places])


def clients_with(states: Sequence[Tensor]) -> list[TrainedClients]:
    """Return the clients of as many lanes, which have trained to these states."""
    clients = []
    for lane_states in states:
        losses = torch.zeros(len(lane_states))
        ids = torch.arange(len(lane_states))
        clients.append(TrainedClients(ids, lane_states, lane_states, losses, losses))
    return clients


def test_slices_of_one_tensor_are_read_where_they_are() -> None:
    table = torch.arange(12.0).view(6, 2)
    whole = states_of(clients_with(table[1:].split([2, 3])))
    assert torch.equal(whole, table[1:])
    assert whole.data_ptr() == table[1:].data_ptr()
    for apart in (
        [table[:2], table[3:]],  # a gap
        [table[3:], table[:3]],  # in another order
        [table[:2], table[2:].clone()],
        [table[:, :1], table[:, 1:2]],
    ):
        copied = states_of(clients_with(apart))
        assert torch.equal(copied, torch.cat(apart))
        assert copied.data_ptr() != apart[0].data_ptr()
    with pytest.raises(RuntimeError):  # rows of another width are never read as one table
        states_of(clients_with([table[:1], table.view(-1)[2:6].view(1, 4)]))
    for same in [table[0].expand(1, -1)], [table[0].expand(3, -1)[:1], table[1].expand(3, -1)[:1]]:
        assert torch.equal(states_of(clients_with(same)), torch.cat(same))


@pytest.mark.parametrize("counts", [[2, 2, 2], [1, 1, 1], [3, 1, 2], [0, 3, 0], [0, 0, 0]])
@pytest.mark.parametrize("own_starts", [False, True])
def test_deltas_of_several_lanes_are_those_of_each(counts: list[int], own_starts: bool) -> None:
    """Whether the states of the lanes are slices of one tensor or not."""
    draw = rng.generator(0, "deltas")
    together = torch.randn(sum(counts), SIZE, generator=draw)
    kept = together.clone()
    for states in together.split(counts), [part.clone() for part in together.split(counts)]:
        clients = []
        for part in states:
            starts = torch.randn(SIZE, generator=draw).expand(len(part), -1)
            starts = starts + part.sign() if own_starts else starts
            ids = torch.arange(len(part))
            clients.append(TrainedClients(ids, starts, part, *torch.rand(2, len(part))))
        found = deltas_of(clients)
        assert torch.equal(found, torch.cat([one.states - one.starts for one in clients]))
        found.zero_()
        assert torch.equal(together, kept)
