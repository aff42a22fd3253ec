from __future__ import annotations

import pytest
import torch

import fakes
from fedglimpse.federation.state import Layout
from fedglimpse.runs.build import WorldSetup
from fedglimpse.runs.experiment import run


def test_the_last_model_is_the_next_global_model() -> None:
    for name in ("sequential", "snake"):
        starts = torch.tensor([[1.0, 5.0], [2.0, 6.0]])
        deltas = torch.tensor([[1.0, 1.0], [4.0, 0.5]])
        update = fakes.update(deltas, starts=starts, num_params=1)
        new = fakes.build(name).aggregator.step(torch.tensor([1.0, 5.0]), update)
        assert new.tolist() == [6.0, 6.5]


def test_every_visit_starts_from_the_one_before() -> None:
    """Two visits in a round are two rounds of one visit each, to the same clients."""
    same = {"method": "sequential", "data.clients": 2, "visibility.kind": "full"}
    same |= {"data.partition": "iid", "local.batch_size": 2000, "local.epochs": 1}  # one step each
    for seed in range(30):  # until both runs happen to visit the two clients in the same order
        once = run({**same, "selection.k": 2, "rounds": 1, "seeds": [seed]})
        twice = run({**same, "selection.k": 1, "rounds": 2, "seeds": [seed]})
        if once.records[0]["selected"] == [r["selected"][0] for r in twice.records]:
            torch.testing.assert_close(once.world.states, twice.world.states)
            return
    pytest.fail("no seed visits both clients in the same order")


def test_clients_come_in_random_order() -> None:
    for name in ("sequential", "snake"):
        selector = fakes.build(name).selector
        choices = [selector.select(fakes.view(ids=range(3), seed=s), 3) for s in range(60)]
        assert len({tuple(c.slots.tolist()) for c in choices}) == 6
        assert all(c.weights is not None and c.weights.tolist() == [1, 1, 1] for c in choices)


def test_snakes_objective() -> None:
    plain = fakes.build("sequential")
    assert (plain.schedule, plain.objective.distill, plain.objective.block_cycle) == (
        "sequential", 0.0, False,
    )  # fmt: skip
    snake = fakes.build("snake").objective
    assert (snake.distill, snake.temperature, snake.block_cycle) == (0.5, 2.0, True)


def test_snake_trains_every_block_however_few_are_visible() -> None:
    few = {"visibility.cluster_size": 1, "selection.k": 4, "rounds": 8}
    done = run({"method": "snake", "data.name": "digits", **few})
    assert done.world.lanes[0].visits == 8
    model = WorldSetup.of(done.config).model(0)
    layout = Layout.of(model)
    before = layout.unpack(layout.read(model))
    after = layout.unpack(done.world.states[0])
    assert not [e.name for e in layout.params if torch.equal(before[e.name], after[e.name])]
