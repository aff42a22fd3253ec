"""Dense layers whose weights step inside the product that gives their gradient, on a GPU.

The compiled step does not ask for gradients of these weights. It adds zeros to the layer's outputs
instead, the slope, and asks for the gradient of those, which is that of the outputs. One product
of it with the layer's inputs then takes the weights downhill in place. Gradients of the weights, as
large as the weights of all clients together, are never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedglimpse.simulation.trainers.jobs import TrainingRecipe

NO_SLOPES: Mapping[str, Tensor] = MappingProxyType({})


def descending(
    layers: list[tuple[str, nn.Module]], recipe: TrainingRecipe, dtype: torch.dtype
) -> dict[str, int]:
    """Return the layers whose weights can step by themselves, with the number of their outputs.

    Args:
        layers: of `trainers.stacked.chain`.
        recipe: a step must be the gradient times a constant, whatever came before.
        dtype: of the activations; weights are float32, and a product has one kind only.
    """
    plain = recipe.optimizer == "sgd" and not recipe.momentum and not recipe.weight_decay
    if not plain or dtype != torch.float32:
        return {}
    dense = {name: layer.out_features for name, layer in layers if isinstance(layer, nn.Linear)}
    return {name: size for name, size in dense.items() if size % 8 == 0}  # as matrix units like it


def sloped(x: Tensor, own: Mapping[str, Tensor], slope: Tensor) -> Tensor:
    """Return a dense layer's outputs `[J, B, O]`.

    Args:
        x: inputs.  # [J, B, F]
        own: its weight `[J, O, F]` and perhaps its bias `[J, O]`.
        slope: zeros.  # [J, B, O]
    """
    out = torch.bmm(x, own["weight"].transpose(1, 2)) + slope
    return out + own["bias"][:, None] if "bias" in own else out


def descend(weight: Tensor, x: Tensor, grad: Tensor, lr: float) -> None:
    """Take a gradient step in place.

    Args:
        weight: of J clients.  # [J, O, F]
        x: inputs of the layer.  # [J, B, F]
        grad: gradient of its slope, zero for clients that rest.  # [J, B, O]
        lr: step size.
    """
    weight.baddbmm_(grad.transpose(1, 2), x, alpha=-lr)  # a third faster where grad is contiguous
