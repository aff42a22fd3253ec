"""A small federation in memory, and a method whose choice is known in advance."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fake_grid import FakeGrid, FakeNode
from torch import Tensor

from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.data.population import Population
from fedglimpse.data.sources import load
from fedglimpse.federation import models as nets
from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.flower.client import client_app
from fedglimpse.flower.deployment import Problem, ServerTerms
from fedglimpse.flower.exchange import Exchange
from fedglimpse.flower.server import FinishedRun, Server
from fedglimpse.methods import registry
from fedglimpse.methods.base import Setting, Stateless
from fedglimpse.runs.build import population_of
from fedglimpse.types import Choice, Method, View

CLIENTS = 6
LARGEST = "small_federation:build"


class Largest(Stateless):
    """Takes the clients that moved furthest."""

    needs = frozenset({"update_norm"})

    def select(self, view: View, k: int) -> Choice:
        return Choice(torch.argsort(view.reports["update_norm"], descending=True)[:k])


def build(setting: Setting) -> Method:
    return Method(Largest(), WeightedDelta())


def config(method: str = "glimpse", **keys: Any) -> Config:
    """Return a small configuration; keys are written with `__` for the dot."""
    values: dict[str, Any] = {
        "method": method,
        "rounds": 3,
        "data.clients": CLIENTS,
        "selection.k": 2,
        "visibility.kind": "full",
        "local.epochs": 1,
        "engine.trainer": "serial",
        "agent.learn_start": 2,
    }
    if ":" not in method:
        options = registry.info(method).example_options
        values |= {f"options.{name}": value for name, value in options.items()}
    return resolve(values | {key.replace("__", "."): value for key, value in keys.items()})


@cache
def population() -> Population:
    return population_of(config(), load("digits"), 0)


def data(settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    rows = population().rows[int(settings["partition-id"])]
    return population().dataset.x_train[rows], population().dataset.y_train[rows]


def problem() -> Problem:
    dataset = population().dataset
    proxy = population().proxy
    return Problem(
        nets.digits_mlp,
        proxy=(dataset.x_train[proxy], dataset.y_train[proxy]),
        num_classes=10,
        test=(dataset.x_test, dataset.y_test),
    )


def grid(clients: int = CLIENTS, names: bool = False, app: Any = None) -> FakeGrid:
    """Return a grid whose node ids say nothing about the clients."""
    app = app or client_app(nets.digits_mlp, data=data)
    nodes = []
    for i in range(clients):
        name = f"site-{i}" if names else ""
        nodes.append(FakeNode(900 - 31 * i, app, {"partition-id": i}, name))
    return FakeGrid(nodes)


class GridExchange(Exchange):
    """An exchange whose time is the grid's."""

    def __init__(self, grid: FakeGrid, poll: float, patience: float) -> None:
        super().__init__(grid, poll, patience, clock=grid.clock, sleep=grid.sleep)


TERMS = ServerTerms(
    start_timeout=10, visible_timeout=10, hello_timeout=10, train_timeout=10, upload_timeout=10
)


def serve(
    grid: FakeGrid, settings: Config, out: Path | None = None, terms: ServerTerms = TERMS
) -> FinishedRun:
    return Server(settings, problem(), terms, out).run(grid)
