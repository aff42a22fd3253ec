"""What is done for all lanes of a round at once, against what each lane would do."""

from __future__ import annotations

import small_world as small
import torch
from torch import Tensor

from fedglimpse.data.config import DataConfig
from fedglimpse.data.partition import PARTITIONS
from fedglimpse.data.population import Population, virtual_rows
from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.simulation.local_training import ClientRows
from fedglimpse.types import Method


def taken(client_rows: ClientRows, people: list[Population], ids: list[list[int]]) -> Tensor:
    """Ask for the rows of some clients."""
    client_rows.hold(people, torch.device("cpu"))
    pairs = list(zip(people, ids, strict=True))
    sizes: list[int] = []
    for population, clients in pairs:
        sizes += [len(population.rows[client]) for client in clients]
    return client_rows.take(pairs, torch.tensor(sizes), max(sizes))


def test_rows_are_those_of_each_population() -> None:
    client_rows = ClientRows()
    first, second, third = (small.population(sizes) for sizes in ((5, 9, 2), (4, 1, 7), (3, 30)))
    for people, ids in (
        ([first, second], [[2, 0], [1]]),
        ([second], [[2, 1]]),
        ([second, second], [[0], [2]]),  # two lanes of one population
        ([third, first], [[1, 0], [2]]),  # one that was not there before
        ([second], [[2, 0]]),  # one that was let go
    ):
        pairs = list(zip(people, ids, strict=True))
        table = taken(client_rows, people, ids)
        alone = [one.take(torch.tensor(some))[0] for one, some in pairs]
        expected = [row for rows in alone for row in rows]
        assert len(table) == len(expected)
        for row, own in zip(table, expected, strict=True):
            assert row[: len(own)].tolist() == own.tolist()
            assert not row[len(own) :].any()


def test_clients_that_draw_their_rows_are_asked_one_by_one() -> None:
    dealt = small.population()
    labels = dealt.dataset.y_train
    settings = DataConfig(partition="iid", clients=10**6, samples=4)
    drawn = virtual_rows(labels, torch.arange(len(labels)), PARTITIONS["iid"], settings, seed=0)
    people = Population(dealt.dataset, drawn, dealt.proxy)
    table = taken(ClientRows(), [people, dealt], [[999_999, 3], [0]])
    assert table[0, :4].tolist() == people.rows[999_999].tolist()
    assert table[2, : len(dealt.rows[0])].tolist() == dealt.rows[0].tolist()


def test_a_world_sends_the_rows_of_its_lanes_once() -> None:
    """Lanes that train before and after the choice ask at different times in every round."""
    needs: list[frozenset[str]] = [frozenset({"train_loss"}), frozenset()]
    methods = [Method(small.Fixed([0, 1], needs=some), WeightedDelta()) for some in needs]
    world = small.world([small.lane(one, seed) for seed, one in enumerate(methods)])
    small.run_round(world)
    table = world._client_rows._rows
    small.run_round(world)
    assert world._client_rows._rows is table
