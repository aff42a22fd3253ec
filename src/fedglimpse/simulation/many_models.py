"""Many states of one model over examples at once, in evaluation mode.

There are two kinds of passes: `StackedMany` on `simulation/trainers/stacked.py`, and on a GPU with
Triton the kernels of `simulation/cuda/`. A model or device without one is run state by state
(`Evaluator.logits`, the readable twin).
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
from fedglimpse.simulation.cuda.memory import smaller_until_it_fits
from fedglimpse.simulation.trainers.stacked import StackedModel

# Examples of all states together in one forward pass.
CPU_EXAMPLES = 4000
GPU_EXAMPLES = 16_000
GPU_FLAT_EXAMPLES = 128_000  # of inputs that are not images
GRADIENT_FACTOR = 4  # times fewer examples where activations are kept
SMALL_GPU = 2**35  # bytes of a GPU that takes so many examples; larger ones take more,
LARGEST_GPU_FACTOR = 4  # up to so many times as many
LARGEST_INDEX = 2**31 // 256  # of one state's pixels in a pass: kernels count 256 channels of them


class Forward(Protocol):
    """A pass of S models in evaluation mode."""

    def __call__(self, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits `[S, B, C]` of stacked tensors `[S, *shape]` on inputs `[S, B, *shape]`."""


class ManyModels:
    """Runs S states in one pass, in pieces of the examples that fit into memory."""

    def __init__(
        self, layout: Layout, forward: Forward, fixed: frozenset[str] = frozenset()
    ) -> None:
        """Run states of `layout` by `forward`; the gradient of `fixed` parameters is 0."""
        self.layout = layout
        self.forward = forward
        self.fixed = fixed

    @torch.no_grad()
    def logits(self, states: Tensor, x: Tensor) -> Tensor:
        """Return the logits `[S, n, C]` of states `[S, d]` on raw examples `[S, n, *shape]`."""
        named = self.layout.unpack(states)
        count = x.shape[1]

        def in_pieces(largest: int) -> Tensor:
            if x.is_cuda:  # pieces of about equal size
                num_pieces = max(-(-count // largest), 1)
                largest = max(-(-count // num_pieces), 1)
            pieces = [self.forward(named, as_input(piece)) for piece in x.split(largest, dim=1)]
            return torch.cat(pieces, dim=1)

        largest = _examples_in_a_pass(x, 1)
        return smaller_until_it_fits(in_pieces, largest) if x.is_cuda else in_pieces(largest)

    def gradients(self, states: Tensor, x: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
        """Return the gradients `[S, num_params]` of mean losses at states `[S, d]`.

        Args:
            states: where the gradients are taken.
            x: raw examples, padded.  # [S, n, *shape]
            y: their labels, padded.  # [S, n]
            sizes: real examples of each state.  # [S]
        """
        named = self.layout.unpack(states)
        leaves = []
        for entry in self.layout.params:
            leaf = named[entry.name].clone().requires_grad_()
            named[entry.name] = leaf
            leaves.append(leaf)
        is_real = torch.arange(x.shape[1], device=x.device) < sizes[:, None]
        weights = is_real / sizes[:, None].clamp(min=1)  # [S, n]

        def in_pieces(largest: int) -> Tensor:
            total = states.new_zeros(len(states), self.layout.num_params)
            tensors = [x, y, weights]
            if x.is_cuda:
                largest, *tensors = in_even_pieces(largest, x, y, weights)
            pieces = zip(*(tensor.split(largest, dim=1) for tensor in tensors), strict=True)
            for piece_x, piece_y, piece_weights in pieces:
                logits = self.forward(named, as_input(piece_x)).float()
                losses = F.cross_entropy(logits.flatten(0, 1), piece_y.flatten(), reduction="none")
                weighted_loss = (losses * piece_weights.flatten()).sum()
                gradients = torch.autograd.grad(weighted_loss, leaves)
                total += torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)
            return total

        gradients = smaller_until_it_fits(in_pieces, _examples_in_a_pass(x, GRADIENT_FACTOR))
        for entry in self.layout.params:
            if entry.name in self.fixed:
                gradients[:, entry.start : entry.stop] = 0
        return gradients


class StackedMany:
    """Passes of `StackedModel` with every layer in evaluation mode."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.stacked = StackedModel(model)
        self.precision = precision

    def __call__(self, state: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits `[S, B, C]`."""
        with numerics(x.device, self.precision):
            return self.stacked.forward(x, state, None, frozen=self.stacked.names)


def in_even_pieces(
    largest: int, x: Tensor, y: Tensor, weights: Tensor
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return a power of two, at most `largest`, and examples that divide into pieces of it.

    A GPU's kernels for gradients are compiled for the size of a piece, which takes seconds: so few
    different sizes, whatever the number of clients and their examples. Padding has weight 0.
    """
    count = x.shape[1]
    size = min(1 << (largest.bit_length() - 1), 1 << (count - 1).bit_length())
    padding = -count % size
    padded = []
    for tensor in (x, y, weights):
        zeros = tensor.new_zeros(len(tensor), padding, *tensor.shape[2:])
        padded.append(torch.cat([tensor, zeros], dim=1))
    return size, padded[0], padded[1], padded[2]


def _examples_in_a_pass(x: Tensor, factor: int) -> int:
    """Return how many examples of every state go into one pass.

    Args:
        x: the examples.  # [S, n, *shape]
        factor: divides what fits into a forward pass.
    """
    limit = CPU_EXAMPLES
    if x.is_cuda:
        limit = GPU_FLAT_EXAMPLES if x.dim() == 3 else GPU_EXAMPLES
        memory = torch.cuda.get_device_properties(x.device).total_memory
        usable = memory * torch.cuda.get_per_process_memory_fraction(x.device)
        limit *= min(max(int(usable / SMALL_GPU), 1), LARGEST_GPU_FACTOR)
    examples = limit // (factor * max(len(x), 1))
    if x.is_cuda and x.dim() == 5:  # images [S, n, C, H, W]
        examples = min(examples, LARGEST_INDEX // (x.shape[3] * x.shape[4]))
    return max(examples, 1)
