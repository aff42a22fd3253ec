"""From a configuration to a world: the last place that knows configuration keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.config.checks import check, check_counts, pick_device
from fedglimpse.config.schema import Config
from fedglimpse.data.custom import is_own
from fedglimpse.data.dataset import Dataset, as_input
from fedglimpse.data.population import Population, build_population, default_proxy_size
from fedglimpse.data.sources import load
from fedglimpse.errors import UserError
from fedglimpse.federation.costs import CostModel, ModelFlops
from fedglimpse.federation.devices import Precision, check_precision
from fedglimpse.federation.models import build_model, head_entries
from fedglimpse.federation.reports import Sizes
from fedglimpse.federation.sketches import Scale, build_sketch
from fedglimpse.federation.state import Layout
from fedglimpse.federation.visibility import build_visibility
from fedglimpse.methods import registry
from fedglimpse.methods.base import Setting
from fedglimpse.simulation.client_reports import Reporter
from fedglimpse.simulation.client_reports import Sketch as SketchOfRows
from fedglimpse.simulation.evaluation import Evaluator, Reward
from fedglimpse.simulation.trainers.choose import (
    has_convolutions,
    many_models,
    recipe_of,
    trainer_of,
)
from fedglimpse.simulation.trainers.jobs import Examples, LocalTrainer
from fedglimpse.simulation.world import Lane, World
from fedglimpse.types import Visibility

SKETCH_SEED = 0  # shared by every client and every run, so that policies can travel


# Runs that agree on these keys can share a world: their clients train in the same batches.
_SHARED = (
    "data.name", "data.proxy", "model.", "sketch.", "engine.",
    "local.optimizer", "local.lr", "local.momentum", "local.weight_decay",
    "local.batch_size", "local.epochs", "local.augment",
)  # fmt: skip


@dataclass(frozen=True)
class Parts:
    """What all lanes share, and all worlds that are built on the same parts.

    `config` says so, of which only the keys of `together_key` are read.
    """

    config: Config
    dataset: Dataset
    device: torch.device
    precision: Precision

    @staticmethod
    def of(config: Config) -> Parts:
        """Check `config` and load its data."""
        check(config)
        device = pick_device(config.engine.device)
        precision = cast(Precision, config.engine.precision)
        check_precision(device, precision)
        registry.find(config.method)  # an unknown method is noticed before data is loaded
        return Parts(config, load(config.data.name).to(device), device, precision)

    @cached_property
    def trainer(self) -> LocalTrainer:
        """The trainer, which may take long to compile, once."""
        images = self.dataset.x_train.dim() == 4
        recipe = recipe_of(self.config.local, images)
        examples = Examples(self.dataset.x_train, self.dataset.y_train, recipe.augment)
        settings = self.config.engine
        return trainer_of(settings, self.model(0), examples, recipe, self.device, self.precision)

    @cached_property
    def sketch(self) -> SketchOfRows:
        """The sketch of parameter rows, whose matrix may be large."""
        return sketch_of(self.config, Layout.of(self.model(0)))

    def model(self, seed: int) -> nn.Module:
        """Return a new model with the initial weights of `seed`."""
        data, settings = self.dataset, self.config.model
        with rng.isolated(seed, "model"):
            shape = tuple(data.x_train.shape[1:])
            name = settings.name or default_model(data.name)
            return build_model(name, settings.norm, shape, data.num_classes).to(self.device)

    def start(self, seed: int) -> Tensor:
        """Return the initial state `[d]` of `seed`."""
        model = self.model(seed)
        return Layout.of(model).read(model)

    def lane(self, config: Config, seed: int) -> Lane:
        """Return one federation of `config`, at round 0."""
        population = population_of(config, self.dataset, seed)
        check_counts(config, population.num_clients)
        if int(population.sizes.max()) < 2:
            raise UserError(
                f"No client holds more than one example, and a batch of one trains nothing: give "
                f"the {population.num_clients} clients more with data.samples, or have fewer with "
                "data.clients."
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
            visibility=visibility_of(config, population.num_clients),
            method=registry.build(config.method, setting),
            reward=Reward(config.reward.metric, config.reward.smoothing),  # type: ignore[arg-type]
            k=config.selection.k,
            min_visible=config.visibility.min_visible,
        )


def default_model(dataset: str) -> str:
    """Return the model of a dataset; a user's own data gets the one that takes any shape."""
    return "synthetic" if is_own(dataset) else dataset


def together_key(config: Config) -> tuple[tuple[str, Any], ...]:
    """Return what runs must agree on to share a world."""
    return tuple((k, v) for k, v in sorted(config.flat().items()) if k.startswith(_SHARED))


def build_world(config: Config | Sequence[Config]) -> World:
    """Check configurations and build their world, one lane for each seed of each.

    Raises:
        UserError: for a setting that cannot be run, or runs that cannot share a world.
    """
    configs = [config] if isinstance(config, Config) else list(config)
    for other in configs:
        check(other)
        registry.find(other.method)
        _check_together(configs[0], other)
    return world_of(Parts.of(configs[0]), configs)


def world_of(parts: Parts, configs: Sequence[Config]) -> World:
    """Build the world of configurations that were checked, on parts that are there already."""
    config = parts.config
    pairs = [(other, seed) for other in configs for seed in other.seeds]
    lanes = [parts.lane(other, seed) for other, seed in pairs]
    model = parts.model(config.seeds[0])
    layout = Layout.of(model)
    channels_last = parts.device.type == "cpu" and has_convolutions(model)
    many = many_models(model, parts.dataset.input_shape, parts.device, parts.precision)
    classes = parts.dataset.num_classes
    evaluator = Evaluator(model, classes, parts.precision, channels_last, many)
    return World(
        dataset=parts.dataset,
        lanes=lanes,
        start=torch.stack([parts.start(seed) for _, seed in pairs]),
        trainer=parts.trainer,
        evaluator=evaluator,
        reporter=Reporter(parts.sketch, layout.num_params, evaluator),
        costs=CostModel(
            flops=_flops(parts),
            sizes=Sizes(
                state=layout.size,
                sketch=config.sketch.size,
                proxy=len(lanes[0].population.proxy),
                classes=parts.dataset.num_classes,
            ),
            epochs=config.local.epochs,
        ),
    )


def _check_together(one: Config, other: Config) -> None:
    for (name, value), (_, found) in zip(together_key(one), together_key(other), strict=True):
        if value != found:
            raise UserError(
                f"Runs with {name}={value!r} and {name}={found!r} cannot share a world: run them "
                "apart."
            )


def population_of(config: Config, dataset: Dataset, seed: int) -> Population:
    """Split the training data among clients as `data.*` says."""
    data = config.data
    partition = data.partition
    if partition == "label_skew" and not data.exact_classes:
        partition = "shards"
    return build_population(
        dataset,
        partition=partition,
        num_clients=data.clients,
        alpha=data.alpha,
        classes_per_client=data.classes_per_client,
        equal_size=data.equal_size,
        min_size=data.min_size,
        proxy_size=data.proxy if data.proxy >= 0 else default_proxy_size(len(dataset.y_train)),
        proxy_source=data.proxy_source,  # type: ignore[arg-type]
        seed=seed,
        samples=data.samples,
    )


def visibility_of(config: Config, num_clients: int) -> Visibility:
    """Build the visibility pattern of `visibility.*`."""
    v = config.visibility
    return build_visibility(
        v.kind,
        num_clients,
        cluster_size=v.cluster_size,
        p=v.p,
        overlap=v.overlap,
        p_on=v.p_on,
        p_off=v.p_off,
        trace=v.trace,
        round_seconds=v.round_seconds,
        trace_devices=v.trace_devices,
    )


def sketch_of(config: Config, layout: Layout) -> SketchOfRows:
    """Return the sketch of parameter rows, made when first used."""
    entries = head_entries(layout) if config.sketch.parameters == "head" else layout.params
    index = torch.cat([torch.arange(e.start, e.stop) for e in entries])
    start, stop, size = entries[0].start, entries[-1].stop, len(index)
    made: list[SketchOfRows] = []

    def sketch(rows: Tensor) -> Tensor:
        if not made:
            kind, scale = config.sketch.kind, cast(Scale, config.sketch.scale)
            width = config.sketch.size
            made.append(build_sketch(kind, size, width, SKETCH_SEED, scale=scale, cached=True))
        one_stretch = size == stop - start
        return made[0](rows[..., start:stop] if one_stretch else rows[..., index.to(rows.device)])

    return sketch


def _flops(parts: Parts) -> ModelFlops:
    return ModelFlops.of(
        parts.model(0), as_input(parts.dataset.x_train[:2]), parts.dataset.num_classes
    )
