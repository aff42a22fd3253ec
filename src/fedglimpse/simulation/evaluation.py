"""Passes of models over examples, without training: scores, losses, gradients, and the reward.

`Scores` are what a model is worth on a set of examples; `Evaluator` runs states of one model, one
by one or many at once (`many_models.py`); `Reward` smooths the scores of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fedglimpse.data.dataset import as_input
from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.many_models import ManyModels

CPU_BATCH = 200  # larger batches page-fault on a CPU
GPU_BATCH = 5000
GRADIENT_BATCH = 200


@dataclass(frozen=True)
class Scores:
    """How good a model is on a set of examples."""

    accuracy: float
    macro_f1: float
    per_class_f1: Tensor  # [C]
    loss: float
    predicted: Tensor  # [C] share of examples predicted as each class


def on_its_way(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the CPU; returns a function that waits for the copy.

    Work that is given to a GPU after this call is not waited for.
    """
    if values.device.type != "cuda":
        copy = values.cpu()
        return lambda: copy
    copy = torch.empty_like(values, device="cpu", pin_memory=True)
    copy.copy_(values, non_blocking=True)
    has_arrived = torch.cuda.Event()
    has_arrived.record(torch.cuda.current_stream(values.device))

    def wait() -> Tensor:
        has_arrived.synchronize()
        return copy

    return wait


def scores_later(logits: Tensor, y: Tensor, num_classes: int) -> Callable[[], list[Scores]]:
    """Start to score the logits of S models; returns a function that waits for the device.

    The F1 of an absent class is 0.

    Args:
        logits: of every model on its examples.  # [S, n, C]
        y: their labels.  # [S, n]
        num_classes: C.
    """
    models = y.shape[0]
    examples = y.shape[1]
    true_class = torch.arange(models, device=y.device)[:, None] * num_classes + y
    cells = (true_class * num_classes + logits.argmax(2)).flatten()
    counts = torch.zeros(models * num_classes**2, device=y.device, dtype=torch.long)
    counts.scatter_add_(0, cells, torch.ones_like(cells))  # bincount would wait for a GPU twice
    losses = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none")
    loss = losses.view(models, examples).mean(1, keepdim=True)
    copied = on_its_way(torch.cat([counts.view(models, -1).double(), loss.double()], dim=1))

    def wait() -> list[Scores]:
        numbers = copied()  # [S, C * C + 1]
        confusion = numbers[:, :-1].unflatten(1, (num_classes, num_classes))  # [S, true, predicted]
        return scores_of(confusion, numbers[:, -1], examples)

    return wait


def scores_of(confusion: Tensor, loss: Tensor, examples: int) -> list[Scores]:
    """Return the scores of S models.

    Args:
        confusion: examples by true and predicted class.  # [S, C, C]
        loss: mean loss of each model.  # [S]
        examples: of each model.
    """
    hits = confusion.diagonal(dim1=1, dim2=2)  # [S, C]
    predicted = confusion.sum(1)
    f1 = 2 * hits / (confusion.sum(2) + predicted).clamp(min=1)
    columns = (  # in the order of the fields of `Scores`
        (hits.sum(1) / examples).tolist(),
        f1.mean(1).tolist(),
        f1.float().unbind(),
        loss.tolist(),
        (predicted / examples).float().unbind(),
    )
    return [Scores(*values) for values in zip(*columns, strict=True)]


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
        return self.scores_later(states, x, y)()

    def scores_later(self, states: Tensor, x: Tensor, y: Tensor) -> Callable[[], list[Scores]]:
        """Start to score as `scores` does; returns a function that waits for the device."""
        return scores_later(self.logits_of(states, x), y, self.num_classes)

    def score(self, state: Tensor, x: Tensor, y: Tensor) -> Scores:
        """Return the scores of one state `[d]` on raw examples and labels."""
        return self.scores(state[None], x[None], y[None])[0]


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
