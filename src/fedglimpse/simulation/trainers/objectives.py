"""Local objectives beyond the cross-entropy: training one block of layers, and distillation.

`training_only` freezes all layers but one block. `distillation` is the distance to the model that
a client received, as part of its local loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn

_WEIGHT_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

Block = tuple[str, ...]  # names of layers


def blocks_of(model: nn.Module) -> list[Block]:
    """Split a model into blocks, in its own order.

    A block is a weight layer (dense or convolution) and the layers with parameters or buffers
    that follow it: its normalisation. What comes before the first weight layer joins that one.
    """
    blocks: list[list[str]] = [[]]
    seen_weight_layer = False
    for name, layer in model.named_modules():
        if not _has_tensors(layer):
            continue
        if isinstance(layer, _WEIGHT_LAYERS):
            if seen_weight_layer:
                blocks.append([])
            seen_weight_layer = True
        blocks[-1].append(name)
    return [tuple(block) for block in blocks]


def serpentine(visit: int, count: int) -> int:
    """Return the block that visit number `visit` trains, of `count` blocks.

    Visits go up through the blocks and down again: 0, 1, .., n-1, n-1, .., 1, 0, 0, 1, ...
    """
    position = visit % (2 * count)
    if position < count:
        return position
    return 2 * count - 1 - position


def layer_of(entry: str) -> str:
    """Return the layer that a tensor of the state belongs to: "3.weight" is of "3"."""
    return entry.rpartition(".")[0]


@contextmanager
def training_only(model: nn.Module, block: Collection[str]) -> Iterator[None]:
    """Train only the layers of `block` inside the context; the model is in training mode.

    The others get no gradients, and their BatchNorms use and keep their running statistics: a
    frozen block is the same function in training and in evaluation.
    """
    frozen_parameters: list[nn.Parameter] = []
    for name, layer in model.named_modules():
        if name in block or not _has_tensors(layer):
            continue
        layer.training = False
        for parameter in layer.parameters(recurse=False):
            if parameter.requires_grad:
                frozen_parameters.append(parameter)
                parameter.requires_grad_(False)
    try:
        yield
    finally:
        model.train()
        for parameter in frozen_parameters:
            parameter.requires_grad_(True)


def _has_tensors(layer: nn.Module) -> bool:
    """True where a layer itself, not a layer inside it, has parameters or buffers."""
    for _ in layer.parameters(recurse=False):
        return True
    for _ in layer.buffers(recurse=False):
        return True
    return False


def distillation(logits: Tensor, teacher: Tensor, temperature: Tensor) -> Tensor:
    """Return T^2 KL(softmax(teacher / T) || softmax(logits / T)) of every example.

    The factor T^2 keeps gradients at the scale of the cross-entropy for every temperature.

    Args:
        logits: of the model in training.  # [..., B, C]
        teacher: logits of the frozen model.  # [..., B, C]
        temperature: T.  # [...], one for each batch
    """
    divisor = temperature[..., None, None]  # float32, so that bf16 logits are promoted
    student_log = F.log_softmax(logits / divisor, dim=-1)
    teacher_log = F.log_softmax(teacher / divisor, dim=-1)
    terms = teacher_log.exp() * (teacher_log - student_log)  # [..., B, C]
    divergence = terms.sum(-1)  # [..., B]
    factor = temperature[..., None].square()
    return factor * divergence
