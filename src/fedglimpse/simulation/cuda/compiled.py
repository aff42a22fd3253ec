"""The loss of a training step, compiled once for every structure of model.

Compiling takes half a minute, and a program that plays many federations makes many trainers. So
the compiled forms outlive them: models of the same layers share one, whatever their values and
whatever the number of clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.simulation.cuda.channels_last import Passed, forward

Layers = list[tuple[str, nn.Module]]
Named = Mapping[str, Tensor]
Losses = Callable[[Tensor, Tensor, Named, Tensor, Named], tuple[Tensor, Tensor, Named, Named]]

_compiled: dict[tuple[Any, ...], Losses] = {}


def losses_of(layers: Layers, dtype: torch.dtype, compiled: bool) -> Losses:
    """Return a function of inputs, labels, state, counts and slopes, all with clients in front.

    It returns the sum of mean losses, the loss of every example `[J, B]`, new buffers, and the
    inputs of the layers with a slope; gradients come from the first alone.

    Args:
        layers: of `trainers.stacked.chain`; their values are not used.
        dtype: of the activations.
        compiled: fuse elementwise work with torch.compile.
    """

    def losses(
        x: Tensor, y: Tensor, state: Named, counts: Tensor, slopes: Named
    ) -> tuple[Tensor, Tensor, Named, Named]:
        if x.dim() == 5:
            x = x.permute(0, 1, 3, 4, 2)
        passed: Passed = forward(layers, state, x, counts, dtype, slopes=slopes)
        logits = passed.logits.float()
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
        real = torch.arange(y.shape[1], device=y.device) < counts[:, None]
        each = each * real
        total = (each.sum(1) / counts.clamp(min=1)).sum()
        inputs = {name: value.detach() for name, value in passed.inputs.items()}
        return total, each.detach(), passed.buffers, inputs

    if not compiled:
        return losses
    structure = (dtype, *((name, type(layer), repr(layer)) for name, layer in layers))
    if structure not in _compiled:
        _compiled[structure] = torch.compile(losses)
    return _compiled[structure]


def any_number(*tensors: Tensor) -> None:
    """Let what is compiled for these tensors hold for any number of clients, their first size.

    Their other sizes stay fixed: kernels are made for them.
    """
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
        torch._dynamo.mark_static(tensor, list(range(1, tensor.dim())))
