"""Evaluation passes of many models on a GPU, with the convolutions of `conv.py`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.simulation.cuda.channels_last import forward
from fedglimpse.simulation.trainers.stacked import chain


class ChannelsLastMany:
    """Passes of `channels_last.forward` with running statistics."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        """Take the structure of `model`, which must be of layers that `fits`."""
        self.layers = chain(model)
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.flags: Precision = "fp32" if precision == "fp32" else "tf32"

    def __call__(self, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits `[S, B, C]`."""
        if x.dim() == 5:
            x = x.permute(0, 1, 3, 4, 2)
        counts = torch.full((len(x),), x.shape[1], device=x.device)
        with numerics(x.device, self.flags):  # bf16 is written into the pass itself
            passed = forward(self.layers, state, x, counts, self.dtype, training=False)
        return passed.logits.float()
