"""Many states of one model over examples at once, in evaluation mode.

A form for every engine: `StackedMany` on `simulation/trainers/stacked.py`, and on a GPU with Triton
the kernels of
`sim/gpu`. A model or device without one is run state by state (`Evaluator.logits`, the readable
twin).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.data.dataset import as_input
from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.memory import smaller_until_it_fits
from fedglimpse.simulation.trainers.stacked import StackedModel

_EXAMPLES = {"cpu": 4000, "cuda": 16_000}  # in one forward pass, all states together
_FLAT_EXAMPLES = {"cuda": 128_000}  # the same for inputs that are not images
_WITH_GRADIENT = 4  # times fewer where activations are kept
_SMALL_GPU = 2**35  # bytes of a GPU that takes so many; larger ones take more, up to
_MOST_TIMES = 4  # times as many
_NUMBERS = 2**31 // 256  # of one state's pixels in a pass: kernels count up to 256 channels of them


class Forward(Protocol):
    """A pass of S models in evaluation mode."""

    def __call__(self, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits `[S, B, C]` of stacked tensors `[S, *shape]` on inputs `[S, B, *shape]`."""


class ManyModels:
    """Runs S states in one pass, in pieces that fit into memory."""

    def __init__(
        self, layout: Layout, forward: Forward, fixed: frozenset[str] = frozenset()
    ) -> None:
        """Use `forward` for states of this layout; the gradient of `fixed` parameters is 0."""
        self.layout, self.forward, self.fixed = layout, forward, fixed

    @torch.no_grad()
    def logits(self, states: Tensor, x: Tensor) -> Tensor:
        """Return the logits `[S, n, C]` of states `[S, d]` on raw examples `[S, n, *shape]`."""
        named = self.layout.unpack(states)

        def attempt(room: int) -> Tensor:
            if x.is_cuda:  # pieces of about equal size
                room = -(-x.shape[1] // max(-(-x.shape[1] // room), 1))
            pieces = x.split(max(room, 1), dim=1)
            return torch.cat([self.forward(named, as_input(piece)) for piece in pieces], dim=1)

        return smaller_until_it_fits(attempt, _room(x, 1))

    def gradients(self, states: Tensor, x: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
        """Return the gradients `[S, num_params]` of mean losses at states `[S, d]`.

        Args:
            states: where the gradients are taken.
            x: raw examples, padded.  # [S, n, *shape]
            y: their labels, padded.  # [S, n]
            sizes: real examples of each state.  # [S]
        """
        named = self.layout.unpack(states)
        leaves = [named[e.name].clone().requires_grad_() for e in self.layout.params]
        named |= {e.name: leaf for e, leaf in zip(self.layout.params, leaves, strict=True)}
        real = torch.arange(x.shape[1], device=x.device) < sizes[:, None]
        weights = real / sizes[:, None].clamp(min=1)  # [S, n]

        def attempt(room: int) -> Tensor:
            total, examples = states.new_zeros(len(states), self.layout.num_params), [x, y, weights]
            if x.is_cuda:
                room, *examples = in_even_pieces(room, x, y, weights)
            pieces = (tensor.split(room, 1) for tensor in examples)
            for some_x, some_y, some in zip(*pieces, strict=True):
                logits = self.forward(named, as_input(some_x)).float()
                each = F.cross_entropy(logits.flatten(0, 1), some_y.flatten(), reduction="none")
                grads = torch.autograd.grad((each * some.flatten()).sum(), leaves)
                total += torch.cat([g.flatten(1) for g in grads], dim=1)
            return total

        total = smaller_until_it_fits(attempt, _room(x, _WITH_GRADIENT))
        for entry in self.layout.params:
            if entry.name in self.fixed:
                total[:, entry.start : entry.stop] = 0
        return total


class StackedMany:
    """Passes of `StackedModel` with every layer in evaluation mode."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.stacked, self.precision = StackedModel(model), precision

    def __call__(self, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits `[S, B, C]`."""
        with numerics(x.device, self.precision):
            return self.stacked.forward(x, state, None, frozen=self.stacked.names)


def in_even_pieces(
    room: int, x: Tensor, y: Tensor, weights: Tensor
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return a power of two, at most `room`, and examples that go into pieces of it.

    A GPU's kernels for gradients are compiled for the size of a piece, which takes seconds: so few
    different sizes, whatever the number of clients and their examples. What is added has weight 0.
    """
    n = x.shape[1]
    room = min(1 << (room.bit_length() - 1), 1 << (n - 1).bit_length())
    more = -n % room
    x, y, weights = (
        torch.cat([some, some.new_zeros(len(some), more, *some.shape[2:])], dim=1)
        for some in (x, y, weights)
    )
    return room, x, y, weights


def _room(x: Tensor, times: int) -> int:
    """Return how many examples of every state go into one pass."""
    limits = {**_EXAMPLES, **_FLAT_EXAMPLES} if x.dim() == 3 else _EXAMPLES  # [S, n, F]
    limit = limits.get(x.device.type, 4000)
    if x.is_cuda:
        memory = torch.cuda.get_device_properties(x.device).total_memory
        ours = memory * torch.cuda.get_per_process_memory_fraction(x.device)
        limit *= min(max(int(ours / _SMALL_GPU), 1), _MOST_TIMES)
    room = limit // (times * max(len(x), 1))
    if x.is_cuda and x.dim() == 5:  # images [S, n, C, H, W]
        room = min(room, _NUMBERS // (x.shape[3] * x.shape[4]))
    return max(room, 1)
