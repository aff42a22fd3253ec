"""The sketch of a device: the simulator's projection; only a small matrix is kept in memory.

What a device computes: local training, and the reports that a method asks for.

Everything here is the simulator's own code on the data of one client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.config.schema import LocalConfig, SketchConfig
from fedglimpse.data.dataset import Dataset, as_input
from fedglimpse.data.population import Population
from fedglimpse.federation.models import head_entries
from fedglimpse.federation.reports import CATALOGUE
from fedglimpse.federation.sketches import Scale, Sketch, build_sketch
from fedglimpse.federation.state import Layout
from fedglimpse.flower.messages import section
from fedglimpse.simulation.client_reports import Reporter
from fedglimpse.simulation.evaluation import Evaluator
from fedglimpse.simulation.gradients import distance, mean_gradient
from fedglimpse.simulation.trained_clients import TrainedClients
from fedglimpse.simulation.trainers.choose import recipe_of
from fedglimpse.simulation.trainers.jobs import Examples, TrainingJobs
from fedglimpse.simulation.trainers.serial import SerialTrainer
from fedglimpse.types import LocalObjective

SHARED_SEED = 0  # of the projection; the simulator's, so that policies can travel
KEPT = 2**24  # floats of a matrix that stays in memory: a process may serve many messages


def projection(settings: SketchConfig, layout: Layout) -> Callable[[Tensor], Tensor]:
    """Return the map from parameters `[..., num_params]` to sketches `[..., D]`.

    Args:
        settings: `sketch.*` of the run.
        layout: of the model.
    """
    entries = head_entries(layout) if settings.parameters == "head" else layout.params
    index = torch.cat([torch.arange(e.start, e.stop) for e in entries])
    sketch = _built(settings.kind, len(index), settings.size, cast(Scale, settings.scale))
    return lambda rows: sketch(rows[..., index])


@lru_cache(maxsize=1)
def _built(kind: str, size_in: int, size_out: int, scale: Scale) -> Sketch:
    cached = size_in * size_out <= KEPT
    return build_sketch(kind, size_in, size_out, SHARED_SEED, scale=scale, cached=cached)


Settings = Mapping[str, Any]  # what `train` and `data` are told: the server's and the node's keys
Train = Callable[[nn.Module, Settings], Mapping[str, float]]
Data = Callable[[Settings], tuple[Tensor, Tensor]]

GRADIENTS = frozenset({"gradient_distance", "gradient_distance_l2"})
WITH_DATA = GRADIENTS | {"loss", "loss_after", "proxy_predictions"}
ALONE = frozenset({"sketch", "delta_sketch", "update_norm", "train_loss", "rms_loss"})
OBJECTIVES = frozenset({"proximal", "distill", "blocks"})  # what a client may minimise besides


def asked(objective: LocalObjective) -> frozenset[str]:
    """Return the parts of an objective that go beyond a client's own loss."""
    parts = {
        "proximal": objective.proximal_mu > 0,
        "distill": objective.distill > 0,
        "blocks": objective.block_cycle,
    }
    return frozenset(name for name, used in parts.items() if used)


def local_training(data: Data) -> Train:
    """Return a `train` that follows the server's `local.*` and objective, as the simulator does.

    Args:
        data: gives this client's examples, uint8 images or float rows, and labels.
    """

    def train(model: nn.Module, settings: Settings) -> dict[str, float]:
        x, y = data(settings)
        recipe = recipe_of(LocalConfig(**section(settings, "local")), images=x.dim() == 4)
        start = Layout.of(model).read(model)
        trainer = SerialTrainer(model, Examples(x, y, recipe.augment), recipe)
        done = trainer.train(start[None], _job(settings, len(y)))
        Layout.of(model).write(done.states[0], model)
        return {
            "num-examples": len(y),
            "train_loss": float(done.loss[0]),
            "rms_loss": float(done.squared_loss[0].sqrt()),
        }

    return train


def _job(settings: Settings, size: int) -> TrainingJobs:
    """Return the one training of this client, with the simulator's randomness."""
    objective = LocalObjective(**section(settings, "objective"))
    key = rng.key(settings["seed"], "train", settings["round"], settings["client"])
    return TrainingJobs(
        start=torch.zeros(1, dtype=torch.long),
        keys=torch.tensor([key]),
        rows=torch.arange(size)[None],
        sizes=torch.tensor([size]),
        mu=torch.tensor([float(objective.proximal_mu)]),
        squared=torch.tensor([objective.proximal_squared]),
        distill=torch.tensor([float(objective.distill)]),
        temperature=torch.tensor([float(objective.temperature)]),
        visit=torch.tensor([settings["visit"] if objective.block_cycle else -1]),
    )


@dataclass(frozen=True)
class Training:
    """What a client trained from, what came of it, and what it said about it."""

    start: Tensor  # [d]
    state: Tensor  # [d]
    metrics: Mapping[str, float]


class Device:
    """Computes reports about one model on one client."""

    def __init__(self, model: nn.Module, settings: Settings, data: Data | None) -> None:
        """Keep the model as the instance that states are written into."""
        self.layout, self.settings, self.data = Layout.of(model), settings, data
        self.evaluator = Evaluator(model, settings["classes"])
        sketch = projection(SketchConfig(**section(settings, "sketch")), self.layout)
        self.reporter = Reporter(sketch, self.layout.num_params, self.evaluator)

    def probes(
        self, names: frozenset[str], state: Tensor, gradient: Tensor | None
    ) -> dict[str, Tensor]:
        """Return reports at the received model: name -> scalar.

        Args:
            names: of the reports; those of other phases are ignored.
            state: the received model.  # [d]
            gradient: of the proxy set at that model, where it is needed.  # [num_params]
        """
        names = frozenset(n for n in names if CATALOGUE[n].phase == "probe")
        if not names:
            return {}
        population = self._population(None)
        first = torch.tensor([0])
        found = self.reporter.probes(names - GRADIENTS, state, population, first)
        reports = {name: value[0] for name, value in found.items()}
        if names & GRADIENTS:
            assert gradient is not None
            data = population.dataset
            own = mean_gradient(self.evaluator, state, data.x_train, data.y_train)
            for name in names & GRADIENTS:
                each = name == "gradient_distance"
                reports[name] = distance(self.layout, own, gradient, each).float()
        return reports

    def trained(
        self, names: frozenset[str], done: Training, proxy: Tensor | None
    ) -> dict[str, Tensor]:
        """Return reports about a training: name -> scalar or `[D]`.

        Args:
            names: of the reports; those of other phases are ignored.
            done: the training.
            proxy: inputs that the model is asked about, where it is needed.  # [P, *shape]
        """
        names = frozenset(n for n in names if CATALOGUE[n].phase == "trained")
        loss, rms = (done.metrics.get(n, 0.0) for n in ("train_loss", "rms_loss"))
        clients = TrainedClients(
            ids=torch.tensor([0]),
            starts=done.start[None],
            states=done.state[None],
            loss=torch.tensor([float(loss)]),
            squared_loss=torch.tensor([float(rms) ** 2]),
        )
        population = self._population(proxy) if names & WITH_DATA else _nobody()
        found = self.reporter.trained(names, clients, population)
        return {name: value[0] for name, value in found.items()}

    def _population(self, proxy: Tensor | None) -> Population:
        """Return this client as a population of one, with the server's proxy inputs if any."""
        assert self.data is not None
        x, y = self.data(self.settings)
        rows, more = torch.arange(len(y)), 0 if proxy is None else len(proxy)
        if proxy is not None:
            x = as_input(x)  # the server may store its images as bytes, this client as floats
            x, y = torch.cat([x, as_input(proxy).to(x.dtype)]), torch.cat([y, y.new_zeros(more)])
        classes = self.settings["classes"]
        dataset = Dataset("local", "local", x, y, x[:0], y[:0], classes)
        return Population(dataset, (rows,), len(rows) + torch.arange(more))


def _nobody() -> Population:
    empty = torch.zeros(0)
    return Population(
        Dataset("none", "none", empty, empty.long(), empty, empty.long(), 1), (), empty.long()
    )
