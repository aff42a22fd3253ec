"""This package: a world of the case's data and the default engine, `method=fedavg`.

It does a little more than the others: it keeps a proxy set, a tenth of the clients' examples, and
scores every new model on it.
"""

from __future__ import annotations

import torch
from job import BATCH, EPOCHS, LR, Case, contest

from fedglimpse.config.loading import resolve
from fedglimpse.data.dataset import Dataset
from fedglimpse.runs.build import WorldSetup, world_of
from fedglimpse.runs.rounds import run_round, selectors_of
from fedglimpse.version import VERSION


def dataset(case: Case, proxy: int) -> Dataset:
    """Return the case's data, with more rows for the proxy set; images as bytes, as they are."""
    x, y, x_test, y_test = case.data()
    x, y = torch.cat([x, x[:proxy]]), torch.cat([y, y[:proxy]])
    if x.dim() == 4:
        x, x_test = ((part * 255).round().to(torch.uint8) for part in (x, x_test))
    return Dataset(case.name, case.name, x, y, x_test, y_test, case.classes)


def play(case: Case, rounds: int, threads: int) -> list[float]:
    proxy = case.clients * case.samples // 10
    config = resolve(
        {
            "method": "fedavg",
            "data.name": case.name,
            "data.partition": "iid",
            "data.clients": case.clients,
            "data.proxy": proxy,
            "visibility.kind": "full",
            "selection.k": case.clients,
            "local.lr": LR,
            "local.batch_size": BATCH,
            "local.epochs": EPOCHS,
            "engine.device": "cpu",
        }
    )
    setup = WorldSetup(config, dataset(case, proxy), torch.device("cpu"), "fp32")
    world = world_of(setup, [config])
    assert world.lanes[0].population.sizes.tolist() == [case.samples] * case.clients
    selectors = selectors_of(world)
    records = [run_round(world, True, selectors)[0] for _ in range(rounds)]
    assert all(len(record["selected"]) == case.clients for record in records)
    return [record["seconds"] for record in records]


if __name__ == "__main__":
    contest(VERSION, play)
