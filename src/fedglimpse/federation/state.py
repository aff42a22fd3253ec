"""A model state as one flat row of floats: parameters first, then float buffers.

States travel through the package as `[..., d]` tensors, so that aggregation, sketches, windows and
costs are plain vector arithmetic. Integer buffers (BatchNorm's batch counters) carry no information
for averaging and are left out.
"""

from __future__ import annotations

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
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                tensors[name] = buffer
        entries: list[Entry] = []
        start = 0
        for name, tensor in tensors.items():
            stop = start + tensor.numel()
            entries.append(Entry(name, tuple(tensor.shape), start, stop))
            start = stop
        num_params = sum(parameter.numel() for parameter in model.parameters())
        return Layout(tuple(entries), num_params, start)

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
        leading = flat.shape[:-1]
        named: dict[str, Tensor] = {}
        for entry in self.entries:
            floats = flat[..., entry.start : entry.stop]
            named[entry.name] = floats.view(*leading, *entry.shape)
        return named

    def pack(self, named: Mapping[str, Tensor]) -> Tensor:
        """Concatenate named tensors into flat rows; the inverse of `unpack`."""
        rows: list[Tensor] = []
        for entry in self.entries:
            tensor = named[entry.name]
            leading = tensor.shape[: tensor.dim() - len(entry.shape)]
            rows.append(tensor.reshape(*leading, entry.stop - entry.start))
        return torch.cat(rows, dim=-1)

    def read(self, model: nn.Module) -> Tensor:
        """Copy the state of `model` into a new flat row `[d]`."""
        return self.pack({name: tensor.detach() for name, tensor in _tensors(model).items()})

    @torch.no_grad()
    def write(self, flat: Tensor, model: nn.Module) -> None:
        """Copy a flat row `[d]` into `model`."""
        tensors = _tensors(model)
        for entry in self.entries:
            floats = flat[entry.start : entry.stop]
            tensors[entry.name].copy_(floats.view(entry.shape))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())
