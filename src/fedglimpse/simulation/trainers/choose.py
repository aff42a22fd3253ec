"""From `engine.*` and `local.*` to what does the arithmetic: the fastest that fits."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

from fedglimpse.config.schema import EngineConfig, LocalConfig
from fedglimpse.errors import UserError
from fedglimpse.federation.devices import Precision
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.many_models import ManyModels, StackedMany
from fedglimpse.simulation.trainers.batched import BatchedTrainer
from fedglimpse.simulation.trainers.jobs import Examples, LocalTrainer, TrainingRecipe
from fedglimpse.simulation.trainers.serial import SerialTrainer
from fedglimpse.simulation.trainers.stacked import unstackable


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
    most = settings.max_jobs if isinstance(settings.max_jobs, int) else None  # None: what fits
    slow_stack = device.type == "cpu" and has_convolutions(model)
    shape = examples.x.shape[1:]
    if kind == "graphed" or (kind == "auto" and device.type == "cuda"):
        check_trainer(kind, model, shape, device)
        if not _not_graphed(model, shape, device):
            from fedglimpse.simulation.cuda.trainer import GraphedTrainer

            return GraphedTrainer(model, examples, recipe, precision, most)
    if kind == "batched" or (kind == "auto" and not slow_stack and not unstackable(model, shape)):
        return BatchedTrainer(model, examples, recipe, precision, most)
    return SerialTrainer(model, examples, recipe, precision, channels_last=slow_stack)


def check_trainer(kind: str, model: nn.Module, shape: Sequence[int], device: torch.device) -> None:
    """Raise UserError where `engine.trainer` asks for what cannot be had.

    Args:
        kind: of trainer.
        model: that clients train.
        shape: of one example.
        device: where they train.
    """
    reason = _not_graphed(model, shape, device) if kind == "graphed" else ""
    if reason:
        raise UserError(f"engine.trainer=graphed {reason}: use engine.trainer=auto.")
    odd = unstackable(model, shape) if kind == "batched" else ""
    if odd:
        raise UserError(
            f"engine.trainer=batched cannot stack {odd}: use engine.trainer=auto, or build the "
            "model from nn.Sequential with the layers listed in docs/simulator.md."
        )


def _not_graphed(model: nn.Module, shape: Sequence[int], device: torch.device) -> str:
    """Say why the GPU trainer cannot be had; empty where it can."""
    if device.type != "cuda":
        return "needs engine.device=cuda"
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which comes with PyTorch for CUDA"
    from fedglimpse.simulation.cuda.channels_last import fits

    if odd := unstackable(model, shape):
        return f"cannot take {odd}"
    return "" if fits(model) else "takes only the layers listed in docs/simulator.md"


def has_convolutions(model: nn.Module) -> bool:
    """True where some layer is a convolution."""
    return any(isinstance(m, nn.Conv2d) for m in model.modules())


def many_models(
    model: nn.Module, shape: Sequence[int], device: torch.device, precision: Precision
) -> ManyModels | None:
    """Return the fastest way to run many states at once; None: one after the other is.

    Args:
        model: whose states are run.
        shape: of one example.
        device: where.
        precision: of the passes.
    """
    if (device.type == "cpu" and has_convolutions(model)) or unstackable(model, shape):
        return None
    layout = Layout.of(model)
    fixed = frozenset(n for n, p in model.named_parameters() if not p.requires_grad)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from fedglimpse.simulation.cuda.channels_last import fits
        from fedglimpse.simulation.cuda.many_models import ChannelsLastMany

        if fits(model):
            return ManyModels(layout, ChannelsLastMany(model, precision))
    return ManyModels(layout, StackedMany(model, precision), fixed)
