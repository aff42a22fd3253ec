"""The learning task: replace model and data by your own."""

from functools import cache
from typing import Any

from torch import Tensor, nn

from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.data.population import Population
from fedglimpse.data.sources import load
from fedglimpse.flower.messages import section
from fedglimpse.runs.build import population_of


def make_model() -> nn.Module:
    """Build the model; server and clients must build the same."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.BatchNorm1d(256),
        nn.Linear(256, 10),
    )


def my_data(settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return this client's examples and labels.

    A real device reads its own files. Here every client takes its share of the digits: the one
    named by `partition-id` in its node configuration.
    """
    keys = {f"data.{name}": value for name, value in section(settings, "data").items()}
    population = split(tuple(keys.items()), settings["seed"])
    rows = population.rows[int(settings["partition-id"])]
    return population.dataset.x_train[rows], population.dataset.y_train[rows]


@cache
def split(keys: tuple[tuple[str, Any], ...], seed: int) -> Population:
    """Partition the digits over the clients, with a proxy set for the server."""
    return population_of(resolve(dict(keys)), load("digits"), seed)


def server_data(config: Config) -> dict[str, Any]:
    """Return the examples on which the server scores models."""
    population = population_of(config, load("digits"), config.seeds[0])
    dataset = population.dataset
    proxy = (dataset.x_train[population.proxy], dataset.y_train[population.proxy])
    test = (dataset.x_test, dataset.y_test)
    return {"proxy": proxy, "test": test, "num_classes": 10}
