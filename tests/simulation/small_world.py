"""A federation small enough to check by hand: 4 features, 3 classes, a few clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.population import Population
from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.federation.costs import CostModel, ModelFlops
from fedglimpse.federation.reports import Sizes
from fedglimpse.federation.state import Layout
from fedglimpse.runs import rounds
from fedglimpse.simulation.client_reports import Reporter
from fedglimpse.simulation.evaluation import Evaluator, Reward
from fedglimpse.simulation.trainers.jobs import (
    Examples,
    LocalTrainer,
    TrainingJobs,
    TrainingRecipe,
    TrainingResults,
)
from fedglimpse.simulation.trainers.serial import SerialTrainer
from fedglimpse.simulation.world import Lane, World
from fedglimpse.types import Choice, Method, Outcome, Update, View

FEATURES, CLASSES, SKETCH, PROXY = 4, 3, 2, 9
SIZES = (12, 9, 20, 5, 16)
RECIPE = TrainingRecipe("sgd", lr=0.1, batch_size=8, epochs=2)


@dataclass
class Seen:
    """A visibility pattern that shows the same clients in every round."""

    ids: Sequence[int]

    def visible(self, seed: int, round_num: int) -> Tensor:
        return torch.tensor(self.ids, dtype=torch.long)


@dataclass
class Fixed:
    """A selector that always gives the same answer and remembers what it was shown."""

    slots: Sequence[int]
    weights: Sequence[float] | None = None
    needs: frozenset[str] = frozenset()
    learns_from: frozenset[str] = frozenset()
    views: list[View] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    def select(self, view: View, k: int) -> Choice:
        self.views.append(view)
        weights = None if self.weights is None else torch.tensor(self.weights)
        return Choice(torch.tensor(self.slots), weights)

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        self.outcomes.append(outcome)
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Watching(WeightedDelta):
    """FedAvg's aggregator that keeps the updates it was given."""

    def __init__(self, needs: frozenset[str] = frozenset()) -> None:
        self.needs = needs
        self.updates: list[Update] = []

    def step(self, state: Tensor, update: Update) -> Tensor:
        self.updates.append(update)
        return super().step(state, update)


class Last(Watching):
    """Takes the last client's model, as sequential learning does."""

    def step(self, state: Tensor, update: Update) -> Tensor:
        self.updates.append(update)
        return update.starts[-1] + update.deltas[-1]


@dataclass
class Poisoned:
    """A trainer whose results are not finite for some clients, known by their first row."""

    trainer: LocalTrainer
    first_rows: Sequence[int]
    value: float = torch.nan
    place: int = 3  # in the state

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        trained = self.trainer.train(start, jobs)
        states = trained.states.clone()
        states[torch.isin(jobs.rows[:, 0], torch.tensor(self.first_rows)), self.place] = self.value
        return replace(trained, states=states)


def model(seed: int = 0) -> nn.Sequential:
    with rng.isolated(seed, "small"):
        net = nn.Sequential(
            nn.Linear(FEATURES, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)
        )
    draw = rng.generator(seed, "statistics")
    net[2].running_mean.copy_(torch.rand(6, generator=draw) / 2)
    net[2].running_var.copy_(torch.rand(6, generator=draw) + 0.5)
    return net


def layout() -> Layout:
    return Layout.of(model())


def sketch(rows: Tensor) -> Tensor:
    """Sums of the even and of the odd parameters."""
    return torch.stack([rows[..., ::2].sum(-1), rows[..., 1::2].sum(-1)], dim=-1)


def population(sizes: Sequence[int] = SIZES) -> Population:
    """Clients with consecutive rows; the proxy rows come last."""
    draw, total = rng.generator(0, "small"), sum(sizes) + PROXY
    y = torch.arange(total + 12) % CLASSES
    x = torch.randn(total + 12, FEATURES, generator=draw)
    x[torch.arange(total + 12), y] += 1.5
    data = Dataset("small", "small", x[:total], y[:total], x[total:], y[total:], CLASSES)
    client_rows = torch.arange(sum(sizes)).split(list(sizes))
    return Population(data, tuple(client_rows), torch.arange(sum(sizes), total))


def lane(method: Method, seed: int = 0, k: int = 3, **options: Any) -> Lane:
    """A lane over the small population."""
    people = options.pop("population", None) or population()
    seen = Seen(options.pop("visible", range(people.num_clients)))
    return Lane(seed, people, seen, method, Reward("f1", 0.95), k, **options)


def trainer(people: Population, recipe: TrainingRecipe = RECIPE) -> SerialTrainer:
    data = people.dataset
    return SerialTrainer(model(), Examples(data.x_train, data.y_train, False), recipe)


def world(
    lanes: Sequence[Lane], recipe: TrainingRecipe = RECIPE, poison: Sequence[int] = ()
) -> World:
    """A world of these lanes; the clients `poison` return what is not finite."""
    people = lanes[0].population
    local: LocalTrainer = trainer(people, recipe)
    if poison:
        local = Poisoned(local, [int(people.rows[i][0]) for i in poison])
    state_layout = layout()
    evaluator = Evaluator(model(), CLASSES)
    sizes = Sizes(state_layout.size, SKETCH, PROXY, CLASSES)
    flops = ModelFlops.of(model(), people.dataset.x_train[:2], CLASSES)
    return World(
        dataset=people.dataset,
        lanes=lanes,
        start=torch.stack([state_layout.read(model(lane.seed)) for lane in lanes]),
        trainer=local,
        evaluator=evaluator,
        reporter=Reporter(sketch, state_layout.num_params, evaluator),
        costs=CostModel(flops, sizes, recipe.epochs),
    )


def views(world: World) -> list[View | None]:
    """Begin a round; returns what can be seen in it."""
    return world.views(world.start_round())


def run_round(world: World) -> list[dict[str, Any]]:
    """Run one round of every lane; returns its records."""
    records = rounds.run_round(world, True)
    for record in records:
        del record["seconds"]
    return records
