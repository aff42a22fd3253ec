"""One client after the other with `torch.optim`: the readable trainer, and the reference.

Every other trainer must agree with this one (`tests/parity`).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.trainers.jobs import (
    Examples,
    LossSums,
    TrainingJobs,
    TrainingRecipe,
    TrainingResults,
    batch_counts,
    steps_per_epoch,
)
from fedglimpse.simulation.trainers.objectives import (
    blocks_of,
    distillation,
    serpentine,
    training_only,
)


class SerialTrainer:
    """A plain loop over clients, epochs and batches; takes any `nn.Module`."""

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        recipe: TrainingRecipe,
        precision: Precision = "fp32",
        channels_last: bool = False,
    ) -> None:
        """Keep `model` as the one instance every client trains in turn.

        Args:
            model: on the device of `examples`; its state is overwritten.
            examples: the training set.
            recipe: optimizer, batch size, epochs.
            precision: of forward and backward passes.
            channels_last: memory format of images; faster for convolutions on a CPU.
        """
        self.layout, self.blocks = Layout.of(model), blocks_of(model)
        self.examples, self.recipe, self.precision = examples, recipe, precision
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = cast(nn.Module, model.to(memory_format=self.format))  # type: ignore[call-overload]
        self._counters = [  # not part of a state, and every client starts with its own
            (b, b.clone()) for b in self.model.buffers() if not b.is_floating_point()
        ]
        self._teacher: nn.Module | None = None  # made when first used

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        """Train every job, one after the other."""
        states = start[jobs.start]  # [J, d], a copy
        tally = LossSums(len(jobs), start.device)
        for j in range(len(jobs)):
            job = jobs.pick(torch.tensor([j], device=jobs.start.device))
            teacher = self._teacher_at(states[j]) if job.distill > 0 else None
            self.layout.write(states[j], self.model)
            for counter, fresh in self._counters:
                counter.copy_(fresh)
            self.model.train()
            visit = int(job.visit)
            block = None if visit < 0 else self.blocks[serpentine(visit, len(self.blocks))]
            frozen = nullcontext() if block is None else training_only(self.model, block)
            with frozen, rng.isolated(int(job.keys), "dropout"):
                self._train_one(job, teacher, tally, j)
            states[j] = self.layout.read(self.model)
        return tally.results(states)

    def _train_one(
        self, job: TrainingJobs, teacher: nn.Module | None, tally: LossSums, j: int
    ) -> None:
        """Train the model in place on the only job in `job`, the j-th of the tally."""
        batch_size = self.recipe.batch_size
        params = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = make_optimizer(params, self.recipe)
        anchor = [p.detach().clone() for p in params] if job.mu > 0 else None
        for epoch in range(self.recipe.epochs):
            rows, draws = self.examples.order(job, epoch)
            for step in range(steps_per_epoch(job.sizes, batch_size)):
                count = int(batch_counts(job.sizes, step, batch_size))
                if count == 0:
                    continue
                part = slice(step * batch_size, step * batch_size + count)
                x, y = self.examples.batch(rows[0, part], None if draws is None else draws[0, part])
                if x.dim() == 4:
                    x = x.contiguous(memory_format=self.format)
                with numerics(x.device, self.precision):
                    logits = self.model(x)
                    each = F.cross_entropy(logits, y, reduction="none")  # [B]
                loss = each.mean()
                if teacher is not None:
                    loss = self._distilled(loss, logits, teacher, x, job)
                if anchor is not None:
                    loss = loss + pull(params, anchor, job)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                tally.add(j, each.detach(), torch.tensor(count, device=each.device))

    def _distilled(
        self, loss: Tensor, logits: Tensor, teacher: nn.Module, x: Tensor, job: TrainingJobs
    ) -> Tensor:
        """Mix the loss with distillation from `teacher`."""
        with torch.no_grad(), numerics(x.device, self.precision):
            target = teacher(x)
        share = job.distill[0]
        return (1 - share) * loss + share * distillation(logits, target, job.temperature[0]).mean()

    def _teacher_at(self, state: Tensor) -> nn.Module:
        """Return the frozen model of `state`, in evaluation mode."""
        if self._teacher is None:
            self._teacher = copy.deepcopy(self.model)
        self.layout.write(state, self._teacher)
        return self._teacher.eval()


def pull(params: list[nn.Parameter], anchor: list[Tensor], job: TrainingJobs) -> Tensor:
    """FedProx's penalty: mu/2 ||w - W||^2, or the release's mu * sum of tensor norms."""
    away = [p - a for p, a in zip(params, anchor, strict=True)]
    if bool(job.squared):
        return job.mu[0] / 2 * torch.stack([(v * v).sum() for v in away]).sum()
    return job.mu[0] * torch.stack([v.norm() for v in away]).sum()


def make_optimizer(params: list[nn.Parameter], recipe: TrainingRecipe) -> torch.optim.Optimizer:
    """Return a fresh optimizer, as every client has one in every round."""
    if recipe.optimizer == "adam":
        return torch.optim.Adam(params, lr=recipe.lr, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        params, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )
