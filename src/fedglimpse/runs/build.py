"""From a configuration to a world: the last place that knows configuration keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.config.checks import check, check_counts
from fedglimpse.config.schema import Config
from fedglimpse.data.custom import is_own
from fedglimpse.data.dataset import Dataset, as_input
from fedglimpse.data.population import Population, build_population
from fedglimpse.data.sources import load
from fedglimpse.errors import require
from fedglimpse.federation.costs import CostModel, ModelFlops
from fedglimpse.federation.devices import Precision, check_precision, pick_device
from fedglimpse.federation.models import Norm, build_model
from fedglimpse.federation.reports import Sizes
from fedglimpse.federation.sketches import ParameterSketch
from fedglimpse.federation.state import Layout
from fedglimpse.federation.visibility import build_visibility
from fedglimpse.methods import registry
from fedglimpse.methods.base import Setting
from fedglimpse.methods.build import build_method
from fedglimpse.simulation.client_reports import Reporter
from fedglimpse.simulation.evaluation import Evaluator, Reward
from fedglimpse.simulation.trainers.choose import (
    has_convolutions,
    many_models,
    recipe_of,
    trainer_of,
)
from fedglimpse.simulation.trainers.jobs import Examples, LocalTrainer
from fedglimpse.simulation.world import Lane, World

# Runs that agree on these keys can share a world: their clients train in the same batches.
SHARED_KEYS = (
    "data.name",
    "data.proxy",
    "model.",
    "sketch.",
    "engine.",
    "local.optimizer",
    "local.lr",
    "local.momentum",
    "local.weight_decay",
    "local.batch_size",
    "local.epochs",
    "local.augment",
)

SMALL_DATASET = 2**22  # numbers, 16 MiB of floats


@dataclass(frozen=True)
class WorldSetup:
    """What the lanes of a world share: data, model, trainer, sketch. Worlds may share it too.

    Of `config`, only the keys of `together_key` are read.
    """

    config: Config
    dataset: Dataset
    device: torch.device
    precision: Precision

    @staticmethod
    def of(config: Config) -> WorldSetup:
        """Check `config` and load its data."""
        check(config)
        registry.check_name(config.method)  # before data are loaded
        device = device_of(config)
        precision = cast(Precision, config.engine.precision)
        dataset = load(config.data.name).to(device)
        if device.type == "cpu" and dataset.x_train.numel() <= SMALL_DATASET:
            dataset = dataset.as_inputs()  # once, and not in every batch
        return WorldSetup(config, dataset, device, precision)

    @cached_property
    def trainer(self) -> LocalTrainer:
        """The trainer: made once, because compiling it may take long."""
        images = self.dataset.x_train.dim() == 4
        recipe = recipe_of(self.config.local, images)
        examples = Examples(self.dataset.x_train, self.dataset.y_train, recipe.augment)
        settings = self.config.engine
        return trainer_of(settings, self.model(0), examples, recipe, self.device, self.precision)

    @cached_property
    def sketch(self) -> ParameterSketch:
        """The sketch of parameter rows, whose matrix may be large."""
        return sketch_of(self.config, Layout.of(self.model(0)))

    def model(self, seed: int) -> nn.Module:
        """Return a new model with the initial weights of `seed`."""
        settings = self.config.model
        name = settings.name or default_model(self.dataset.name)
        shape = tuple(self.dataset.x_train.shape[1:])
        with rng.isolated(seed, "model"):
            model = build_model(name, cast(Norm, settings.norm), shape, self.dataset.num_classes)
            return model.to(self.device)

    def start(self, seed: int) -> Tensor:
        """Return the initial state `[d]` of `seed`."""
        model = self.model(seed)
        return Layout.of(model).read(model)

    def lane(self, config: Config, seed: int) -> Lane:
        """Return one federation of `config`, at round 0."""
        population = population_of(config, self.dataset, seed)
        check_counts(config, population.num_clients)
        require(
            int(population.sizes.max()) > 1,
            f"None of the {population.num_clients} clients has more than one example, and a batch "
            "of one is skipped: lower data.clients or raise data.samples.",
            key="data.clients",
        )
        setting = Setting(
            config=config,
            seed=seed,
            sizes=population.sizes,
            num_classes=self.dataset.num_classes,
            num_params=Layout.of(self.model(seed)).num_params,
            device=str(self.device),
        )
        return Lane(
            seed=seed,
            population=population,
            visibility=build_visibility(
                config.visibility, population.num_clients, lambda: population.main_labels
            ),
            method=build_method(config.method, setting),
            reward=Reward(config.reward.metric, config.reward.smoothing),  # type: ignore[arg-type]
            k=config.selection.k,
            min_visible=config.visibility.min_visible,
        )


def device_of(config: Config) -> torch.device:
    """Return the device of a run, or raise UserError if it is not here or lacks the precision."""
    device = pick_device(config.engine.device)
    check_precision(device, cast(Precision, config.engine.precision))
    return device


def default_model(dataset: str) -> str:
    """Return the model of a dataset; custom data get the one that takes any input shape."""
    return "synthetic" if is_own(dataset) else dataset


def together_key(config: Config) -> tuple[tuple[str, Any], ...]:
    """Return what runs must agree on to share a world."""
    items = sorted(config.flat().items())
    return tuple((key, value) for key, value in items if key.startswith(SHARED_KEYS))


def build_world(config: Config | Sequence[Config]) -> World:
    """Check configurations and build their world, one lane for each seed of each.

    Raises:
        UserError: for a setting that cannot be run, or runs that cannot share a world.
    """
    configs = [config] if isinstance(config, Config) else list(config)
    for other in configs[1:]:
        check(other)
        registry.check_name(other.method)
        _check_together(configs[0], other)
    return world_of(WorldSetup.of(configs[0]), configs)


def world_of(setup: WorldSetup, configs: Sequence[Config]) -> World:
    """Build the world of configurations that were checked, from what they share."""
    lanes: list[Lane] = []
    initial_states: list[Tensor] = []
    for config in configs:
        for seed in config.seeds:
            lanes.append(setup.lane(config, seed))
            initial_states.append(setup.start(seed))
    model = setup.model(setup.config.seeds[0])
    layout = Layout.of(model)
    evaluator = Evaluator(
        model,
        setup.dataset.num_classes,
        setup.precision,
        setup.device.type == "cpu" and has_convolutions(model),  # channels last
        many_models(model, setup.dataset.input_shape, setup.device, setup.precision),
    )
    sizes = Sizes(
        state=layout.size,
        sketch=setup.config.sketch.size,
        proxy=len(lanes[0].population.proxy),
        classes=setup.dataset.num_classes,
    )
    return World(
        dataset=setup.dataset,
        lanes=lanes,
        start=torch.stack(initial_states),
        trainer=setup.trainer,
        evaluator=evaluator,
        reporter=Reporter(setup.sketch, layout.num_params, evaluator),
        costs=CostModel(flops=_flops(setup), sizes=sizes, epochs=setup.config.local.epochs),
    )


def _flops(setup: WorldSetup) -> ModelFlops:
    two_examples = as_input(setup.dataset.x_train[:2])
    return ModelFlops.of(setup.model(0), two_examples, setup.dataset.num_classes)


def _check_together(first: Config, other: Config) -> None:
    expected = dict(together_key(first))
    for key, value in together_key(other):
        require(
            value == expected[key],
            f"Runs with {key}={expected[key]!r} and {key}={value!r} cannot share a world: run them "
            "separately.",
            key=key,
        )


def population_of(config: Config, dataset: Dataset, seed: int) -> Population:
    """Split the training data among clients as `data.*` says."""
    return build_population(dataset, config.data, seed)


def sketch_of(config: Config, layout: Layout) -> ParameterSketch:
    """Return the sketch of parameter rows."""
    return ParameterSketch(layout, **asdict(config.sketch))
