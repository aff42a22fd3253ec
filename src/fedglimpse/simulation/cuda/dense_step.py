"""Dense layers whose weights step inside the product that gives their gradient, on a GPU.

The compiled step does not ask for gradients of these weights. It adds zeros to the layer's outputs
instead, an offset, and asks for the gradient of the offset, which is that of the outputs. One
product of it with the layer's inputs then takes the weights downhill in place. Gradients of the
weights, as large as the weights of all clients together, are never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from fedglimpse.simulation.trainers.jobs import TrainingRecipe

NO_OFFSETS: Mapping[str, Tensor] = MappingProxyType({})


def self_stepping_layers(
    layers: list[tuple[str, nn.Module]], recipe: TrainingRecipe, dtype: torch.dtype
) -> dict[str, int]:
    """Return the layers whose weights can step by themselves, with the number of their outputs.

    Args:
        layers: of `trainers.stacked.chain`.
        recipe: a step must be the gradient times a constant, whatever came before.
        dtype: of the activations; weights are float32, and a product has one type only.
    """
    if not recipe.is_plain_sgd or dtype != torch.float32:
        return {}
    outputs: dict[str, int] = {}
    for name, layer in layers:
        if isinstance(layer, nn.Linear) and layer.out_features % 8 == 0:  # as matrix units like it
            outputs[name] = layer.out_features
    return outputs


def dense_with_offset(x: Tensor, params: Mapping[str, Tensor], offset: Tensor) -> Tensor:
    """Return a dense layer's outputs `[J, B, O]`.

    Args:
        x: inputs.  # [J, B, F]
        params: its weight `[J, O, F]` and perhaps its bias `[J, O]`.
        offset: zeros.  # [J, B, O]
    """
    out = torch.bmm(x, params["weight"].transpose(1, 2)) + offset
    return out + params["bias"][:, None] if "bias" in params else out


def step_weight(weight: Tensor, x: Tensor, grad: Tensor, lr: float) -> None:
    """Take a gradient step in place.

    Args:
        weight: of J clients.  # [J, O, F]
        x: inputs of the layer.  # [J, B, F]
        grad: gradient of its offset, zero for clients that rest.  # [J, B, O]
        lr: step size.
    """
    weight.baddbmm_(grad.transpose(1, 2), x, alpha=-lr)  # a third faster where grad is contiguous
