"""From `engine.*` and `local.*` to what does the arithmetic: the fastest that fits."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from fedglimpse.config.schema import EngineConfig, LocalConfig
from fedglimpse.errors import require
from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.evaluation import ManyModels
from fedglimpse.simulation.trainers.batched import BatchedTrainer
from fedglimpse.simulation.trainers.jobs import Examples, LocalTrainer, TrainingRecipe
from fedglimpse.simulation.trainers.serial import SerialTrainer
from fedglimpse.simulation.trainers.stacked import StackedModel, unstackable


def recipe_of(local: LocalConfig, images: bool) -> TrainingRecipe:
    """Return how clients train; only images are augmented."""
    return TrainingRecipe(
        optimizer=local.optimizer,  # type: ignore[arg-type]
        lr=local.lr,
        momentum=local.momentum,
        weight_decay=local.weight_decay,
        batch_size=local.batch_size,
        epochs=local.epochs,
        augment=local.augment and images,
    )


def trainer_of(
    settings: EngineConfig,
    model: nn.Module,
    examples: Examples,
    recipe: TrainingRecipe,
    device: torch.device,
    precision: Precision,
) -> LocalTrainer:
    """Pick the trainer: on a CPU, one client at a time for convolutions, else all at once."""
    kind = settings.trainer
    max_jobs = settings.max_jobs if isinstance(settings.max_jobs, int) else None  # None: what fits
    shape = examples.x.shape[1:]
    if kind == "graphed":
        check_trainer(kind, model, shape, device)
    can_graph = kind == "auto" and not _reason_against_graphed(model, shape, device)
    if kind == "graphed" or can_graph:
        from fedglimpse.simulation.cuda.trainer import GraphedTrainer

        return GraphedTrainer(model, examples, recipe, precision, max_jobs)
    slow_when_stacked = device.type == "cpu" and has_convolutions(model)
    stack = kind == "auto" and not slow_when_stacked and not unstackable(model, shape)
    if kind == "batched" or stack:
        return BatchedTrainer(model, examples, recipe, precision, max_jobs)
    return SerialTrainer(model, examples, recipe, precision, channels_last=slow_when_stacked)


def check_trainer(kind: str, model: nn.Module, shape: Sequence[int], device: torch.device) -> None:
    """Raise UserError where the trainer that `engine.trainer` names cannot be used.

    Args:
        kind: of trainer.
        model: that clients train.
        shape: of one example.
        device: where they train.
    """
    if kind == "graphed":
        reason = _reason_against_graphed(model, shape, device)
        require(
            not reason,
            f"engine.trainer=graphed {reason}: use engine.trainer=auto.",
            key="engine.trainer",
        )
    if kind == "batched":
        layers = unstackable(model, shape)
        require(
            not layers,
            f"engine.trainer=batched cannot stack {layers}: use engine.trainer=auto, or build the "
            "model from nn.Sequential with the layers listed in docs/simulator.md.",
            key="engine.trainer",
        )


def _reason_against_graphed(model: nn.Module, shape: Sequence[int], device: torch.device) -> str:
    """Say why the GPU trainer cannot be used; empty where it can."""
    if device.type != "cuda":
        return "needs engine.device=cuda"
    if not _has_triton():
        return "needs the package triton, which comes with PyTorch for CUDA"
    if layers := unstackable(model, shape):
        return f"cannot take {layers}"
    from fedglimpse.simulation.cuda.channels_last import fits

    return "" if fits(model) else "takes only the layers listed in docs/simulator.md"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def has_convolutions(model: nn.Module) -> bool:
    """True where some layer is a convolution."""
    return any(isinstance(layer, nn.Conv2d) for layer in model.modules())


def many_models(
    model: nn.Module, shape: Sequence[int], device: torch.device, precision: Precision
) -> ManyModels | None:
    """Return the fastest way to run many states at once; None: one after the other is faster.

    Args:
        model: whose states are run.
        shape: of one example.
        device: where.
        precision: of the passes.
    """
    slow_when_stacked = device.type == "cpu" and has_convolutions(model)
    if slow_when_stacked or unstackable(model, shape):
        return None
    if device.type == "cuda" and _has_triton():
        from fedglimpse.simulation.cuda.channels_last import ChannelsLastMany, fits

        if fits(model):
            flags: Precision = "fp32" if precision == "fp32" else "tf32"
            forward = ChannelsLastMany(model, precision)  # bf16 is written into the pass itself
            return ManyModels(Layout.of(model), forward, numerics(device, flags))
    return stacked_models(model, device, precision)


def stacked_models(model: nn.Module, device: torch.device, precision: Precision) -> ManyModels:
    """Return passes of `StackedModel` with every layer in evaluation mode."""
    stacked = StackedModel(model)
    forward = partial(stacked.forward, frozen=stacked.names)
    fixed: set[str] = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            fixed.add(name)
    return ManyModels(Layout.of(model), forward, numerics(device, precision), frozenset(fixed))
