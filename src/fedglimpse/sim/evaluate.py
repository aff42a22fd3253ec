"""Scores of a global model: accuracy, F1 of every class, loss; and the reward made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.data.dataset import as_input
from fedglimpse.layout import Layout
from fedglimpse.sim.precision import Precision, numerics

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


def scores_of(logits: Tensor, y: Tensor, num_classes: int) -> Scores:
    """Score logits `[n, C]` against labels `[n]`; the F1 of an absent class is 0."""
    guess = logits.argmax(1)
    confusion = torch.bincount(y * num_classes + guess, minlength=num_classes**2)
    confusion = confusion.view(num_classes, num_classes).double()  # [true, predicted]
    hits, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    f1 = 2 * hits / (true + predicted).clamp(min=1)
    return Scores(
        accuracy=float(hits.sum() / len(y)),
        macro_f1=float(f1.mean()),
        per_class_f1=f1.float().cpu(),
        loss=float(F.cross_entropy(logits.float(), y)),
        predicted=(predicted / len(y)).float().cpu(),
    )


class Evaluator:
    """Runs global states over a fixed set of examples, in evaluation mode."""

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        precision: Precision = "fp32",
        channels_last: bool = False,
    ) -> None:
        """Keep `model` as the instance that states are written into."""
        self.layout, self.num_classes, self.precision = Layout.of(model), num_classes, precision
        self.format = torch.channels_last if channels_last else torch.contiguous_format
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
        with numerics(batch.device, self.precision):
            return self.model(inputs)

    @torch.no_grad()
    def logits(self, state: Tensor, x: Tensor) -> Tensor:
        """Return the logits `[n, C]` of a state `[d]` on raw examples `[n, *shape]`."""
        self.load(state)
        batches = x.split(CPU_BATCH if x.device.type == "cpu" else GPU_BATCH)
        return torch.cat([self.forward(batch) for batch in batches])

    def score(self, state: Tensor, x: Tensor, y: Tensor) -> Scores:
        """Return the scores of a state `[d]` on raw examples and labels."""
        return scores_of(self.logits(state, x), y, self.num_classes)


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
        before = torch.zeros_like(scores.per_class_f1) if self.per_class is None else self.per_class
        self.total = self.smoothing * score + (1 - self.smoothing) * self.total
        self.per_class = self.smoothing * scores.per_class_f1 + (1 - self.smoothing) * before
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
