"""Passes of models over examples, without training: logits, scores, losses, gradients, the reward.

`Evaluator` runs states of one model one by one, the readable twin, or many at once by `ManyModels`.
There are two kinds of such passes: `StackedMany` on `simulation/trainers/stacked.py`, and on a GPU
with Triton the kernels of `simulation/cuda/`. `Scores` are what a model is worth on a set of
examples; `Reward` smooths the scores of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fedglimpse.data.dataset import as_input
from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.cuda.memory import smaller_until_it_fits
from fedglimpse.simulation.trainers.stacked import StackedModel

# One state at a time: examples of a forward pass.
CPU_BATCH = 200  # larger batches page-fault on a CPU
GPU_BATCH = 5000
GRADIENT_BATCH = 200

# Many states at once: examples of all states together in a forward pass.
CPU_EXAMPLES = 4000
GPU_EXAMPLES = 16_000
GPU_FLAT_EXAMPLES = 128_000  # of inputs that are not images
GRADIENT_FACTOR = 4  # times fewer examples where activations are kept
SMALL_GPU = 2**35  # bytes of a GPU that takes so many examples; larger ones take more,
LARGEST_GPU_FACTOR = 4  # up to so many times as many
LARGEST_INDEX = 2**31 // 256  # of one state's pixels in a pass: kernels count 256 channels of them


@dataclass(frozen=True)
class Scores:
    """How good a model is on a set of examples."""

    accuracy: float
    macro_f1: float
    per_class_f1: Tensor  # [C], 0 for a class that is absent
    loss: float
    predicted: Tensor  # [C] share of examples predicted as each class


class PendingScores:
    """Scores of S models that a GPU may still be computing."""

    def __init__(self, logits: Tensor, y: Tensor, num_classes: int) -> None:
        """Count the predictions; on a GPU this only starts the work.

        Args:
            logits: of every model on its examples.  # [S, n, C]
            y: their labels.  # [S, n]
            num_classes: C.
        """
        self.num_classes = num_classes
        self.num_examples = y.shape[1]
        models = y.shape[0]
        true_class = torch.arange(models, device=y.device)[:, None] * num_classes + y
        cells = (true_class * num_classes + logits.argmax(2)).flatten()
        counts = torch.zeros(models * num_classes**2, device=y.device, dtype=torch.long)
        counts.scatter_add_(0, cells, torch.ones_like(cells))  # bincount would wait for a GPU twice
        losses = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none")
        loss = losses.view(y.shape).mean(1, keepdim=True)
        # By true and predicted class, and the mean loss  [S, C * C + 1]
        self._numbers = torch.cat([counts.view(models, -1).double(), loss.double()], dim=1)
        self._has_arrived: torch.cuda.Event | None = None
        if self._numbers.is_cuda:
            self._numbers, self._has_arrived = start_copy_to_cpu(self._numbers)

    def wait(self) -> list[Scores]:
        """Wait for the device; returns the scores of each model."""
        if self._has_arrived is not None:
            self._has_arrived.synchronize()
        classes = self.num_classes
        loss = self._numbers[:, -1]
        confusion = self._numbers[:, :-1].unflatten(1, (classes, classes))  # [S, true, predicted]
        hits = confusion.diagonal(dim1=1, dim2=2)  # [S, C]
        predicted = confusion.sum(1)
        f1 = 2 * hits / (confusion.sum(2) + predicted).clamp(min=1)
        columns = (  # in the order of the fields of `Scores`
            (hits.sum(1) / self.num_examples).tolist(),
            f1.mean(1).tolist(),
            f1.float().unbind(),
            loss.tolist(),
            (predicted / self.num_examples).float().unbind(),
        )
        return [Scores(*values) for values in zip(*columns, strict=True)]


def start_copy_to_cpu(values: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Start to copy a tensor from a GPU; returns the copy and the event after which it is there.

    Work that is given to the GPU after this call is not waited for.
    """
    copy = torch.empty_like(values, device="cpu", pin_memory=True)
    copy.copy_(values, non_blocking=True)
    has_arrived = torch.cuda.Event()
    has_arrived.record(torch.cuda.current_stream(values.device))
    return copy, has_arrived


class Evaluator:
    """Runs global states over a fixed set of examples, in evaluation mode."""

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        precision: Precision = "fp32",
        channels_last: bool = False,
        many: ManyModels | None = None,
    ) -> None:
        """Use `model` as the instance that states are written into.

        Args:
            model: of any values.
            num_classes: C.
            precision: of the passes.
            channels_last: memory layout of images.
            many: runs several states at once; None: one after the other.
        """
        self.layout = Layout.of(model)
        self.num_classes = num_classes
        self.precision = precision
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = cast(nn.Module, model.to(memory_format=self.format))  # type: ignore[call-overload]
        self.device = next(model.parameters()).device
        self.many = many

    def load(self, state: Tensor) -> None:
        """Make the model that of a state `[d]`, in evaluation mode."""
        self.layout.write(state, self.model)
        self.model.eval()

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loaded model's logits `[B, C]` on raw examples `[B, *shape]`."""
        inputs = as_input(batch)
        if inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=self.format)
        with numerics(batch.device, self.precision):
            return self.model(inputs)

    @torch.no_grad()
    def logits(self, state: Tensor, x: Tensor) -> Tensor:
        """Return the logits `[n, C]` of a state `[d]` on raw examples `[n, *shape]`."""
        self.load(state)
        batches = x.split(CPU_BATCH if x.device.type == "cpu" else GPU_BATCH)
        return torch.cat([self.forward(batch) for batch in batches])

    def mean_gradient(self, state: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the mean loss over all examples, at `state`.

        BatchNorm uses its running statistics and does not change them, so that the batches are
        independent: their mean, weighted by size, is the gradient over all examples at once.

        Args:
            state: where the gradient is taken.  # [d]
            x: raw examples.  # [n, *shape]
            y: their labels.  # [n]

        Returns:
            The gradient of all parameters, 0 for those that do not train.  # [num_params]
        """
        self.load(state)
        params = list(self.model.parameters())
        trainable = [p for p in params if p.requires_grad]
        total = state.new_zeros(self.layout.num_params)
        batches = zip(x.split(GRADIENT_BATCH), y.split(GRADIENT_BATCH), strict=True)
        for batch_x, batch_y in batches:
            logits = self.forward(batch_x).float()
            loss = F.cross_entropy(logits, batch_y, reduction="sum") / len(y)
            gradients = iter(torch.autograd.grad(loss, trainable, materialize_grads=True))
            flat_gradients = []
            for p in params:
                gradient = next(gradients) if p.requires_grad else torch.zeros_like(p)
                flat_gradients.append(gradient.flatten())
            total += torch.cat(flat_gradients)
        return total

    def mean_gradients(self, states: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        """Return `mean_gradient` of every state, each over its own examples.

        Args:
            states: where the gradients are taken.  # [S, d]
            xs: raw examples, one tensor for each state.
            ys: their labels.

        Returns:
            The gradients.  # [S, num_params]
        """
        if not len(states):
            return states.new_zeros(0, self.layout.num_params)
        if self.many is None:
            triples = zip(states, xs, ys, strict=True)
            return torch.stack([self.mean_gradient(state, x, y) for state, x, y in triples])
        sizes = torch.tensor([len(y) for y in ys], device=states.device)
        x = pad_sequence(list(xs), batch_first=True)
        y = pad_sequence(list(ys), batch_first=True)
        return self.many.gradients(states, x, y, sizes)

    @torch.no_grad()
    def logits_of(self, states: Tensor, x: Tensor) -> Tensor:
        """Return the logits `[S, n, C]` of states `[S, d]`, each on its own examples.

        Args:
            states: S of them.  # [S, d]
            x: raw examples; with stride 0 in front where all states share them.  # [S, n, *shape]
        """
        if self.many is not None:
            return self.many.logits(states, x)
        rows = zip(states, x, strict=True)
        return torch.stack([self.logits(state, state_x) for state, state_x in rows])

    def losses(self, states: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
        """Return the loss of every example `[n_s]` of every state, each with its own examples."""
        if not len(states):
            return []
        y = pad_sequence(list(ys), batch_first=True)
        logits = self.logits_of(states, pad_sequence(list(xs), batch_first=True))
        losses = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none")
        rows = zip(losses.view(y.shape), ys, strict=True)
        return [row[: len(state_y)] for row, state_y in rows]  # without the padding

    def scores(self, states: Tensor, x: Tensor, y: Tensor) -> list[Scores]:
        """Return the scores of states `[S, d]` on raw examples `[S, n, *shape]` and labels."""
        return PendingScores(self.logits_of(states, x), y, self.num_classes).wait()

    def score(self, state: Tensor, x: Tensor, y: Tensor) -> Scores:
        """Return the scores of one state `[d]` on raw examples and labels."""
        return self.scores(state[None], x[None], y[None])[0]


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
        largest = _examples_in_a_pass(x, 1)
        if not x.is_cuda and count <= largest:
            return self.forward(named, as_input(x))

        def in_pieces(largest: int) -> Tensor:
            if x.is_cuda:  # pieces of about equal size
                num_pieces = max(-(-count // largest), 1)
                largest = max(-(-count // num_pieces), 1)
            pieces = [self.forward(named, as_input(piece)) for piece in x.split(largest, dim=1)]
            return torch.cat(pieces, dim=1)

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


def gradient_distance(
    layout: Layout, gradients: Tensor, reference: Tensor, per_tensor: bool
) -> Tensor:
    """Return how far gradients `[..., num_params]` are from a reference one `[...]`.

    Args:
        layout: of the model.
        gradients: the gradients.
        reference: the gradient to compare with.  # [num_params]
        per_tensor: sum the norms of all parameter tensors, as the authors of HA-EdgeFLow do; else
            one norm of the whole difference.
    """
    difference = gradients - reference
    if not per_tensor:
        return difference.norm(dim=-1)
    norms = [difference[..., e.start : e.stop].norm(dim=-1) for e in layout.params]
    return torch.stack(norms).sum(0)


@dataclass
class Reward:
    """The paper's Eq. (reward): r^t = lambda * M(W^{t+1}) + (1 - lambda) * r^{t-1}, r^{-1} = 0."""

    metric: Literal["f1", "accuracy"]
    smoothing: float  # lambda
    total: float = 0.0
    per_class: Tensor | None = None  # [C]

    def update(self, scores: Scores) -> tuple[float, Tensor]:
        """Take in the newest proxy scores; returns the scalar and the per-class reward."""
        score = self.score(scores)
        newest = scores.per_class_f1.numpy()
        previous = np.zeros_like(newest) if self.per_class is None else self.per_class.numpy()
        share = float(self.smoothing)  # a NumPy number would widen the arrays
        self.total = share * score + (1 - share) * self.total
        self.per_class = torch.from_numpy(share * newest + (1 - share) * previous)
        return self.total, self.per_class

    def score(self, scores: Scores) -> float:
        """Return M, the unsmoothed metric."""
        return scores.macro_f1 if self.metric == "f1" else scores.accuracy

    def state_dict(self) -> dict[str, Any]:
        """The running values."""
        return {"total": self.total, "per_class": self.per_class}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.total = state["total"]
        self.per_class = state["per_class"]
