"""What a device computes: local training, sketches, and the reports that a method asks for.

Everything here is the simulator's own code on the data of one client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.config.schema import LocalConfig, SketchConfig
from fedglimpse.data.dataset import Dataset, as_input
from fedglimpse.data.population import Population
from fedglimpse.federation.reports import CATALOGUE
from fedglimpse.federation.sketches import ParameterSketch
from fedglimpse.federation.state import Layout
from fedglimpse.flower.messages import section
from fedglimpse.runs.threads import automatic_threads, using_threads
from fedglimpse.simulation.client_reports import Reporter, gradient_distance
from fedglimpse.simulation.evaluation import Evaluator
from fedglimpse.simulation.lane import TrainedClients
from fedglimpse.simulation.trainers.choose import recipe_of
from fedglimpse.simulation.trainers.jobs import Examples, TrainingJobs
from fedglimpse.simulation.trainers.serial import SerialTrainer
from fedglimpse.types import LocalObjective

Settings = Mapping[str, Any]  # what `train` and `data` get: the server's and the node's keys
Train = Callable[[nn.Module, Settings], Mapping[str, float]]
Data = Callable[[Settings], tuple[Tensor, Tensor]]

# What clients can serve: reports, and parts of an objective besides their own loss.
GRADIENTS = frozenset({"gradient_distance", "gradient_distance_l2"})
WITH_DATA = GRADIENTS | {"loss", "loss_after", "proxy_predictions"}
WITHOUT_DATA = frozenset({"sketch", "delta_sketch", "update_norm", "train_loss", "rms_loss"})
OBJECTIVES = frozenset({"proximal", "distill", "blocks"})

LARGEST_CACHED = 2**24  # floats of a sketch's matrix that stays in memory on a device


def objective_parts(objective: LocalObjective) -> frozenset[str]:
    """Return the parts of an objective that go beyond a client's own loss."""
    parts = set()
    if objective.proximal_mu > 0:
        parts.add("proximal")
    if objective.distill > 0:
        parts.add("distill")
    if objective.block_cycle:
        parts.add("blocks")
    return frozenset(parts)


@lru_cache(maxsize=1)  # a process may serve many messages
def _sketch(layout: Layout, settings: SketchConfig) -> ParameterSketch:
    return ParameterSketch(
        layout,
        **asdict(settings),
        largest_cached=LARGEST_CACHED,
    )


def local_training(data: Data) -> Train:
    """Return a `train` that follows the server's `local.*` and objective, as the simulator does.

    Args:
        data: gives this client's examples, uint8 images or float rows, and labels.
    """

    def train(model: nn.Module, settings: Settings) -> dict[str, float]:
        x, y = data(settings)
        size = len(y)
        local = LocalConfig(**section(settings, "local"))
        recipe = recipe_of(local, images=x.dim() == 4)
        layout = Layout.of(model)
        start = layout.read(model)
        examples = Examples(x, y, recipe.augment)
        trainer = SerialTrainer(model, examples, recipe)
        with using_threads(automatic_threads(model)):
            trained = trainer.train(start[None], _job(settings, size))
        layout.write(trained.states[0], model)
        return {
            "num-examples": size,
            "train_loss": float(trained.loss[0]),
            "rms_loss": float(trained.squared_loss[0].sqrt()),
        }

    return train


def _job(settings: Settings, size: int) -> TrainingJobs:
    """Return the one training of this client, with the simulator's randomness."""
    objective = LocalObjective(**section(settings, "objective"))
    key = rng.key(
        settings["seed"],
        "train",
        settings["round"],
        settings["client"],
    )
    visit = settings["visit"] if objective.block_cycle else -1
    return TrainingJobs(
        start=torch.zeros(1, dtype=torch.long),
        keys=torch.tensor([key]),
        rows=torch.arange(size)[None],
        sizes=torch.tensor([size]),
        mu=torch.tensor([float(objective.proximal_mu)]),
        squared=torch.tensor([objective.proximal_squared]),
        distill=torch.tensor([float(objective.distill)]),
        temperature=torch.tensor([float(objective.temperature)]),
        visit=torch.tensor([visit]),
    )


@dataclass(frozen=True)
class DeviceTraining:
    """One training on a device: the model before and after, and the metrics of `train`."""

    start: Tensor  # [d]
    state: Tensor  # [d]
    metrics: Mapping[str, float]


class Device:
    """Computes reports about one model on one client."""

    def __init__(self, model: nn.Module, settings: Settings, data: Data | None) -> None:
        """Use `model` as the instance that states are written into."""
        self.layout = Layout.of(model)
        self.settings = settings
        self.data = data
        self.evaluator = Evaluator(model, settings["classes"])
        sketch_config = SketchConfig(**section(settings, "sketch"))
        sketch = _sketch(self.layout, sketch_config)
        self.reporter = Reporter(sketch, self.layout.num_params, self.evaluator)

    def probes(
        self,
        names: frozenset[str],
        state: Tensor,
        gradient: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return reports at the received model: name -> scalar.

        Args:
            names: of the reports; those of other phases are ignored.
            state: the received model.  # [d]
            gradient: of the proxy set at that model, where it is needed.  # [num_params]
        """
        names = _of_phase(names, "probe")
        if not names:
            return {}
        population = self._population(None)
        rows = self.reporter.probes(
            names - GRADIENTS,
            state,
            population,
            ids=torch.tensor([0]),
        )
        reports = _only_row(rows)
        if names & GRADIENTS:
            assert gradient is not None
            dataset = population.dataset
            local_gradient = self.evaluator.mean_gradient(
                state,
                dataset.x_train,
                dataset.y_train,
            )
            for name in names & GRADIENTS:
                distance = gradient_distance(
                    self.layout,
                    local_gradient,
                    gradient,
                    per_tensor=name == "gradient_distance",
                )
                reports[name] = distance.float()
        return reports

    def trained(
        self,
        names: frozenset[str],
        training: DeviceTraining,
        proxy: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return reports about a training: name -> scalar or `[D]`.

        Args:
            names: of the reports; those of other phases are ignored.
            training: the training.
            proxy: inputs that the model is asked about, where it is needed.  # [P, *shape]
        """
        names = _of_phase(names, "trained")
        loss = float(training.metrics.get("train_loss", 0.0))
        rms_loss = float(training.metrics.get("rms_loss", 0.0))
        this_client = TrainedClients(
            ids=torch.tensor([0]),
            starts=training.start[None],
            states=training.state[None],
            loss=torch.tensor([loss]),
            squared_loss=torch.tensor([rms_loss**2]),
        )
        population = self._population(proxy) if names & WITH_DATA else _no_data()
        rows = self.reporter.trained(names, this_client, population)
        return _only_row(rows)

    def _population(self, proxy: Tensor | None) -> Population:
        """Return this client as a population of one, with the server's proxy inputs if any."""
        assert self.data is not None
        x, y = self.data(self.settings)
        local_rows = torch.arange(len(y))
        num_proxy = 0
        if proxy is not None:
            num_proxy = len(proxy)
            local_x = as_input(x)  # the server may store its images as bytes, this client as floats
            x = torch.cat([local_x, as_input(proxy).to(local_x.dtype)])
            y = torch.cat([y, y.new_zeros(num_proxy)])
        dataset = Dataset(
            name="local",
            label="local",
            x_train=x,
            y_train=y,
            x_test=x[:0],
            y_test=y[:0],
            num_classes=self.settings["classes"],
        )
        proxy_rows = len(local_rows) + torch.arange(num_proxy)
        return Population(dataset, (local_rows,), proxy_rows)


def _of_phase(names: frozenset[str], phase: str) -> frozenset[str]:
    return frozenset(name for name in names if CATALOGUE[name].phase == phase)


def _only_row(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the reports of this client, the only one they are about."""
    return {name: values[0] for name, values in rows.items()}


def _no_data() -> Population:
    no_examples = torch.zeros(0)
    no_labels = no_examples.long()
    dataset = Dataset(
        name="none",
        label="none",
        x_train=no_examples,
        y_train=no_labels,
        x_test=no_examples,
        y_test=no_labels,
        num_classes=1,
    )
    return Population(dataset, rows=(), proxy=no_labels)
