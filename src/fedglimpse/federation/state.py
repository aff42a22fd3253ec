"""A model state as one flat row of floats: parameters first, then float buffers.

States travel through the package as `[..., d]` tensors, so that aggregation, sketches, windows and
costs are plain vector arithmetic. Integer buffers (BatchNorm's batch counters) carry no information
for averaging and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Entry:
    """One tensor of the state and where it lies in the row."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Where every parameter and float buffer of a model lies in its flat state."""

    entries: tuple[Entry, ...]
    num_params: int  # the first `num_params` floats are trainable parameters
    size: int  # d, floats in the whole state

    @staticmethod
    def of(model: nn.Module) -> Layout:
        """Describe `model`."""
        buffers = [(n, b) for n, b in model.named_buffers() if b.is_floating_point()]
        entries, at = [], 0
        for name, tensor in [*model.named_parameters(), *buffers]:
            entries.append(Entry(name, tuple(tensor.shape), at, at + tensor.numel()))
            at += tensor.numel()
        return Layout(tuple(entries), sum(p.numel() for p in model.parameters()), at)

    @property
    def params(self) -> tuple[Entry, ...]:
        """The trainable entries."""
        return tuple(e for e in self.entries if e.stop <= self.num_params)

    @property
    def buffers(self) -> tuple[Entry, ...]:
        """The float buffers."""
        return tuple(e for e in self.entries if e.start >= self.num_params)

    def unpack(self, flat: Tensor) -> dict[str, Tensor]:
        """Return named views into rows `[..., d]`: name -> `[..., *shape]`."""
        lead = flat.shape[:-1]
        return {e.name: flat[..., e.start : e.stop].view(*lead, *e.shape) for e in self.entries}

    def pack(self, named: Mapping[str, Tensor]) -> Tensor:
        """Concatenate named tensors into flat rows; the inverse of `unpack`."""
        first = self.entries[0]
        lead = named[first.name].shape[: named[first.name].dim() - len(first.shape)]
        parts = [named[e.name].reshape(*lead, math.prod(e.shape)) for e in self.entries]
        return torch.cat(parts, dim=-1)

    def read(self, model: nn.Module) -> Tensor:
        """Copy the state of `model` into a new flat row `[d]`."""
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        return self.pack({e.name: named[e.name].detach() for e in self.entries})

    @torch.no_grad()
    def write(self, flat: Tensor, model: nn.Module) -> None:
        """Copy a flat row `[d]` into `model`."""
        named = dict(model.named_parameters()) | dict(model.named_buffers())
        for e in self.entries:
            named[e.name].copy_(flat[e.start : e.stop].view(e.shape))
