"""Passes of models over examples, without training: logits, scores, losses, gradients, the reward.

`Evaluator` runs states of one model one by one, the readable twin, or many at once by `ManyModels`.
There are two kinds of such passes: those of `simulation/trainers/stacked.py`, and on a GPU with
Triton the kernels of `simulation/cuda/`. `Scores` are what a model is worth on a set of examples;
`Reward` smooths the scores of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fedglimpse.data.dataset import as_input
from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.cuda.memory import (
    fitting_examples,
    in_even_pieces,
    smaller_until_it_fits,
)

# One state at a time: examples of a forward pass.
CPU_BATCH = 200  # larger batches page-fault on a CPU
GPU_BATCH = 5000
GRADIENT_BATCH = 200

# Many states at once: `cuda/memory.py` has the numbers of a GPU.
CPU_EXAMPLES = 4000  # of all states together in a forward pass
GRADIENT_FACTOR = 4  # times fewer examples where activations are kept


@dataclass(frozen=True)
class Scores:
    """How good a model is on a set of examples."""

    accuracy: float
    macro_f1: float
    per_class_f1: Tensor  # [C], 0 for a class that is absent
    loss: float
    predicted: Tensor  # [C] share of examples predicted as each class


class PendingScores:
    """Scores of the models of S lanes that a GPU may still be computing."""

    def __init__(self, lanes: Sequence[int], logits: Tensor, y: Tensor) -> None:
        """Count the predictions; on a GPU this only starts the work.

        Args:
            lanes: positions of S lanes.
            logits: of every lane's model on its examples.  # [S, n, C]
            y: their labels.  # [S, n]
        """
        num_models, num_examples, num_classes = logits.shape
        self.lanes = lanes
        self.num_examples = num_examples
        self.num_classes = num_classes
        # The examples of every model by true and predicted class, counted in one flat table.
        model = torch.arange(num_models, device=y.device)[:, None]  # [S, 1]
        first_cells = (model * num_classes + y) * num_classes  # [S, n] of the row of the true class
        cells = (first_cells + logits.argmax(2)).flatten()
        counts = torch.zeros(
            num_models * num_classes**2,
            device=y.device,
            dtype=torch.long,
        )
        counts.scatter_add_(0, cells, torch.ones_like(cells))  # bincount would wait for a GPU twice
        losses = example_losses(logits, y)
        columns = [
            counts.view(num_models, -1).double(),
            losses.mean(1, keepdim=True).double(),
        ]
        self._numbers = torch.cat(columns, dim=1)  # [S, C * C + 1]
        self._has_arrived: torch.cuda.Event | None = None
        if self._numbers.is_cuda:
            self._numbers, self._has_arrived = start_copy_to_cpu(self._numbers)

    def wait(self) -> dict[int, Scores]:
        """Wait for the device; returns the scores by lane."""
        if self._has_arrived is not None:
            self._has_arrived.synchronize()
        shape = (self.num_classes, self.num_classes)
        loss = self._numbers[:, -1]  # [S]
        confusion = self._numbers[:, :-1].unflatten(1, shape)  # [S, true, predicted]
        hits = confusion.diagonal(dim1=1, dim2=2)  # [S, C]
        predicted = confusion.sum(1)  # [S, C]
        actual = confusion.sum(2)  # [S, C]
        f1 = 2 * hits / (actual + predicted).clamp(min=1)
        accuracy = hits.sum(1) / self.num_examples  # [S]
        shares = predicted / self.num_examples
        columns = (  # in the order of the fields of `Scores`
            accuracy.tolist(),
            f1.mean(1).tolist(),
            f1.float().unbind(),
            loss.tolist(),
            shares.float().unbind(),
        )
        scores = [Scores(*values) for values in zip(*columns, strict=True)]
        return dict(zip(self.lanes, scores, strict=True))


def example_losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return the loss of every example `[S, n]`, from logits `[S, n, C]` and labels `[S, n]`."""
    flat_logits = logits.flatten(0, 1).float()
    losses = F.cross_entropy(flat_logits, y.flatten(), reduction="none")
    return losses.view(y.shape)


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
        self.many = many
        # Logits [S, n, C] of states [S, d], each on its own raw examples [S, n, *shape]; these have
        # stride 0 in front where all states share them.
        self.logits_of: Callable[[Tensor, Tensor], Tensor] = self._logits_one_by_one
        if many is not None:
            self.logits_of = many.logits
        self.device = next(model.parameters()).device
        self.numerics = numerics(self.device, precision)
        self.format = torch.contiguous_format
        if channels_last:
            self.format = torch.channels_last
        self.model = cast(nn.Module, model.to(memory_format=self.format))  # type: ignore[call-overload]

    def load(self, state: Tensor) -> None:
        """Make the model that of a state `[d]`, in evaluation mode."""
        self.layout.write(state, self.model)
        self.model.eval()

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loaded model's logits `[B, C]` on raw examples `[B, *shape]`."""
        inputs = as_input(batch)
        if inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=self.format)
        with self.numerics:
            return self.model(inputs)

    @torch.no_grad()
    def logits(self, state: Tensor, x: Tensor) -> Tensor:
        """Return the logits `[n, C]` of a state `[d]` on raw examples `[n, *shape]`."""
        self.load(state)
        batch_size = CPU_BATCH if x.device.type == "cpu" else GPU_BATCH
        batches = x.split(batch_size)
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
        parameters = list(self.model.parameters())
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        total = state.new_zeros(self.layout.num_params)
        batches_of_x = x.split(GRADIENT_BATCH)
        batches_of_y = y.split(GRADIENT_BATCH)
        for batch_x, batch_y in zip(batches_of_x, batches_of_y, strict=True):
            logits = self.forward(batch_x).float()
            loss = F.cross_entropy(logits, batch_y, reduction="sum") / len(y)
            gradients = iter(torch.autograd.grad(loss, trainable, materialize_grads=True))
            flat_gradients: list[Tensor] = []
            for parameter in parameters:
                if parameter.requires_grad:
                    gradient = next(gradients)
                else:
                    gradient = torch.zeros_like(parameter)
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
            gradients: list[Tensor] = []
            for state, state_x, state_y in zip(states, xs, ys, strict=True):
                gradients.append(self.mean_gradient(state, state_x, state_y))
            return torch.stack(gradients)
        sizes = torch.tensor([len(y) for y in ys], device=states.device)
        padded_x = pad_sequence(list(xs), batch_first=True)
        padded_y = pad_sequence(list(ys), batch_first=True)
        return self.many.gradients(states, padded_x, padded_y, sizes)

    def _logits_one_by_one(self, states: Tensor, x: Tensor) -> Tensor:
        logits: list[Tensor] = []
        for state, state_x in zip(states, x, strict=True):
            logits.append(self.logits(state, state_x))
        return torch.stack(logits)

    def losses(self, states: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
        """Return the loss of every example `[n_s]` of every state, each with its own examples."""
        if not len(states):
            return []
        x = pad_sequence(list(xs), batch_first=True)
        y = pad_sequence(list(ys), batch_first=True)
        padded_losses = example_losses(self.logits_of(states, x), y)
        losses: list[Tensor] = []
        for row, state_y in zip(padded_losses, ys, strict=True):
            losses.append(row[: len(state_y)])
        return losses

    def scores(self, states: Tensor, x: Tensor, y: Tensor) -> list[Scores]:
        """Return the scores of states `[S, d]` on raw examples `[S, n, *shape]` and labels."""
        logits = self.logits_of(states, x)
        pending = PendingScores(range(len(states)), logits, y)
        return list(pending.wait().values())

    def score(self, state: Tensor, x: Tensor, y: Tensor) -> Scores:
        """Return the scores of one state `[d]` on raw examples and labels."""
        return self.scores(state[None], x[None], y[None])[0]


class Forward(Protocol):
    """A pass of S models in evaluation mode."""

    def __call__(self, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return logits `[S, B, C]` on inputs `[S, B, *shape]` of stacked tensors `[S, *shape]`."""


class ManyModels:
    """Runs S states in one pass, in pieces of the examples that fit into memory."""

    def __init__(
        self,
        layout: Layout,
        forward: Forward,
        numerics: AbstractContextManager[object],
        fixed: frozenset[str] = frozenset(),
    ) -> None:
        """Run states of `layout`.

        Args:
            layout: of the model.
            forward: runs the passes.
            numerics: their precision.
            fixed: parameters whose gradient is 0.
        """
        self.layout = layout
        self.forward = forward
        self.numerics = numerics
        self.fixed = fixed

    @torch.no_grad()
    def logits(self, states: Tensor, x: Tensor) -> Tensor:
        """Return the logits `[S, n, C]` of states `[S, d]` on raw examples `[S, n, *shape]`."""
        named = self.layout.unpack(states)
        num_states, count = x.shape[:2]
        fits_at_once = not x.is_cuda and num_states * count <= CPU_EXAMPLES
        if fits_at_once and x.is_floating_point():
            with self.numerics:
                return self.forward(x, named)

        def in_pieces(largest: int) -> Tensor:
            if x.is_cuda:  # pieces of about equal size
                num_pieces = max(math.ceil(count / largest), 1)
                largest = max(math.ceil(count / num_pieces), 1)
            logits: list[Tensor] = []
            for piece in x.split(largest, dim=1):
                with self.numerics:
                    logits.append(self.forward(as_input(piece), named))
            return torch.cat(logits, dim=1)

        largest = _examples_in_a_pass(x, 1)
        if x.is_cuda:
            return smaller_until_it_fits(in_pieces, largest)
        return in_pieces(largest)

    def gradients(self, states: Tensor, x: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
        """Return the gradients `[S, num_params]` of mean losses at states `[S, d]`.

        Args:
            states: where the gradients are taken.
            x: raw examples, padded.  # [S, n, *shape]
            y: their labels, padded.  # [S, n]
            sizes: real examples of each state.  # [S]
        """
        named = self.layout.unpack(states)
        leaves: list[Tensor] = []
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
            columns = [tensor.split(largest, dim=1) for tensor in tensors]
            for piece_x, piece_y, piece_weights in zip(*columns, strict=True):
                with self.numerics:
                    logits = self.forward(as_input(piece_x), named)
                losses = example_losses(logits, piece_y).flatten()
                weighted_loss = (losses * piece_weights.flatten()).sum()
                gradients = torch.autograd.grad(weighted_loss, leaves)
                flat_gradients = [gradient.flatten(1) for gradient in gradients]
                total += torch.cat(flat_gradients, dim=1)
            return total

        largest = _examples_in_a_pass(x, GRADIENT_FACTOR)
        gradients = smaller_until_it_fits(in_pieces, largest)
        for entry in self.layout.params:
            if entry.name in self.fixed:
                gradients[:, entry.start : entry.stop] = 0
        return gradients


def _examples_in_a_pass(x: Tensor, factor: int) -> int:
    """Return how many examples of every state go into one pass.

    Args:
        x: the examples.  # [S, n, *shape]
        factor: divides what fits into a forward pass.
    """
    if x.is_cuda:
        return fitting_examples(x, factor)
    num_states = max(len(x), 1)
    return max(CPU_EXAMPLES // (factor * num_states), 1)


class RewardOfRound(NamedTuple):
    """What the proxy scores of a round are worth."""

    score: float  # M, the unsmoothed metric
    total: float
    per_class: Tensor  # [C]


@dataclass
class Reward:
    """The paper's Eq. (reward): r^t = lambda * M(W^{t+1}) + (1 - lambda) * r^{t-1}, r^{-1} = 0."""

    metric: Literal["f1", "accuracy"]
    smoothing: float  # lambda
    total: float = 0.0
    per_class: Tensor | None = None  # [C]

    def update(self, scores: Scores) -> RewardOfRound:
        """Take in the newest proxy scores; returns what they are worth."""
        score = scores.macro_f1 if self.metric == "f1" else scores.accuracy
        newest = scores.per_class_f1.numpy()
        previous = np.zeros_like(newest)
        if self.per_class is not None:
            previous = self.per_class.numpy()
        share = float(self.smoothing)  # a NumPy number would widen the arrays
        self.total = share * score + (1 - share) * self.total
        smoothed = share * newest + (1 - share) * previous
        self.per_class = torch.from_numpy(smoothed)
        return RewardOfRound(score, self.total, self.per_class)

    def state_dict(self) -> dict[str, Any]:
        """The running values."""
        return {"total": self.total, "per_class": self.per_class}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.total = state["total"]
        self.per_class = state["per_class"]
