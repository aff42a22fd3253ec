"""Scores of a global model: accuracy, F1 of every class, loss; and the reward made of them."""

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
    """Start to score the logits of S models; the answer is a function that waits for the device.

    The F1 of an absent class is 0.

    Args:
        logits: of every model on its examples.  # [S, n, C]
        y: their labels.  # [S, n]
        num_classes: C.
    """
    models, examples = y.shape
    place = torch.arange(models, device=y.device)[:, None] * num_classes + y
    cells = (place * num_classes + logits.argmax(2)).flatten()
    losses = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none")
    loss = losses.view(models, examples).mean(1, keepdim=True)
    counts = torch.zeros(models * num_classes**2, device=y.device, dtype=torch.long)
    counts.scatter_add_(0, cells, torch.ones_like(cells))  # bincount would wait for a GPU twice
    home = on_its_way(torch.cat([counts.view(models, -1).double(), loss.double()], dim=1))
    return lambda: _read(home(), examples, num_classes)


def _read(home: Tensor, examples: int, num_classes: int) -> list[Scores]:
    """Make scores of counts of (true, predicted) classes and the loss `[S, C * C + 1]`."""
    confusion = home[:, :-1].unflatten(1, (num_classes, num_classes))  # [S, true, predicted]
    hits, true, guessed = confusion.diagonal(dim1=1, dim2=2), confusion.sum(2), confusion.sum(1)
    f1 = 2 * hits / (true + guessed).clamp(min=1)
    columns = (
        (hits.sum(1) / examples).tolist(),
        f1.mean(1).tolist(),
        f1.float().unbind(),
        home[:, -1].tolist(),
        (guessed / examples).float().unbind(),
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
        """Keep `model` as the instance that states are written into.

        Args:
            model: of any values.
            num_classes: C.
            precision: of the passes.
            channels_last: memory layout of images.
            many: runs several states at once; None: one after the other.
        """
        self.layout, self.num_classes, self.precision = Layout.of(model), num_classes, precision
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

    @torch.no_grad()
    def logits_of(self, states: Tensor, x: Tensor) -> Tensor:
        """Return the logits `[S, n, C]` of states `[S, d]`, each on its own examples.

        Args:
            states: S of them.  # [S, d]
            x: raw examples; with stride 0 in front where all states share them.  # [S, n, *shape]
        """
        if self.many is not None:
            return self.many.logits(states, x)
        return torch.stack([self.logits(s, own) for s, own in zip(states, x, strict=True)])

    def losses(self, states: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Tensor]:
        """Return the loss of every example `[n_s]` of every state, each with its own examples."""
        if not len(states):
            return []
        y = pad_sequence(list(ys), batch_first=True)
        logits = self.logits_of(states, pad_sequence(list(xs), batch_first=True))
        each = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="none")
        return [row[: len(own)] for row, own in zip(each.view(y.shape), ys, strict=True)]

    def scores(self, states: Tensor, x: Tensor, y: Tensor) -> list[Scores]:
        """Return the scores of states `[S, d]` on raw examples `[S, n, *shape]` and labels."""
        return self.scores_later(states, x, y)()

    def scores_later(self, states: Tensor, x: Tensor, y: Tensor) -> Callable[[], list[Scores]]:
        """Start to score; the answer is a function that waits for the device."""
        return scores_later(self.logits_of(states, x), y, self.num_classes)

    def score(self, state: Tensor, x: Tensor, y: Tensor) -> Scores:
        """Return the scores of one state `[d]` on raw examples and labels."""
        return self.scores(state[None], x[None], y[None])[0]


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
        before = np.zeros_like(newest) if self.per_class is None else self.per_class.numpy()
        share = float(self.smoothing)  # a NumPy number would widen the arrays
        self.total = share * score + (1 - share) * self.total
        self.per_class = torch.from_numpy(share * newest + (1 - share) * before)
        return self.total, self.per_class

    def score(self, scores: Scores) -> float:
        """Return M, the unsmoothed metric."""
        return scores.macro_f1 if self.metric == "f1" else scores.accuracy

    def state_dict(self) -> dict[str, Any]:
        """The running values."""
        return {"total": self.total, "per_class": self.per_class}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.total, self.per_class = state["total"], state["per_class"]
