"""One client after the other with `torch.optim`: the readable trainer, and the reference.

Every other trainer must agree with this one (`tests/parity`).
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
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
        self.layout = Layout.of(model)
        self.blocks = blocks_of(model)
        self.examples = examples
        self.recipe = recipe
        self.numerics = numerics(examples.y.device, precision)
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = cast(nn.Module, model.to(memory_format=self.format))  # type: ignore[call-overload]

        # Integer buffers are not part of a state; every client starts with the initial ones.
        self._counters: list[tuple[Tensor, Tensor]] = []  # buffer, its initial value
        for buffer in self.model.buffers():
            if not buffer.is_floating_point():
                self._counters.append((buffer, buffer.clone()))
        self._teacher: nn.Module | None = None  # made when first used

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        """Train every job, one after the other."""
        states = start[jobs.start]  # [J, d], a copy
        sums = LossSums(len(jobs), start.device)
        for j in range(len(jobs)):
            index = torch.tensor([j], device=jobs.start.device)
            job = jobs.pick(index)
            teacher = None
            if job.distill > 0:
                teacher = self._teacher_at(states[j])
            self._load(states[j])
            with self._frozen_blocks(job), rng.isolated(int(job.keys), "dropout"):
                self._train_one(job, teacher, sums, j)
            states[j] = self.layout.read(self.model)
        return sums.results(states)

    def _load(self, state: Tensor) -> None:
        """Make the model that of `state`, in training mode."""
        self.layout.write(state, self.model)
        for counter, initial in self._counters:
            counter.copy_(initial)
        self.model.train()

    def _frozen_blocks(self, job: TrainingJobs) -> AbstractContextManager[None]:
        """Freeze all blocks but the one that the job trains; none where it trains the model."""
        visit = int(job.visit)
        if visit < 0:
            return nullcontext()
        block = self.blocks[serpentine(visit, len(self.blocks))]
        return training_only(self.model, block)

    def _train_one(
        self, job: TrainingJobs, teacher: nn.Module | None, sums: LossSums, j: int
    ) -> None:
        """Train the model in place on the only job in `job`, the j-th of the sums."""
        params = [param for param in self.model.parameters() if param.requires_grad]
        optimizer = make_optimizer(params, self.recipe)
        anchor: list[Tensor] | None = None  # where FedProx pulls to
        if job.mu > 0:
            anchor = [param.detach().clone() for param in params]
        for batch in self.examples.batches(job, self.recipe):
            x = batch.x[0]
            y = batch.y[0]
            if x.dim() == 4:
                x = x.contiguous(memory_format=self.format)
            with self.numerics:
                logits = self.model(x)
                losses = F.cross_entropy(logits, y, reduction="none")  # [B]
            loss = losses.mean()
            if teacher is not None:
                loss = self._distilled(loss, logits, teacher, x, job)
            if anchor is not None:
                loss = loss + proximal_penalty(params, anchor, job)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            count = batch.counts[0].to(losses.device)
            sums.add(j, losses.detach(), count)

    def _distilled(
        self, loss: Tensor, logits: Tensor, teacher: nn.Module, x: Tensor, job: TrainingJobs
    ) -> Tensor:
        """Mix the loss with distillation from `teacher`."""
        with torch.no_grad(), self.numerics:
            target = teacher(x)
        distances = distillation(logits, target, job.temperature[0])  # [B]
        share = job.distill[0]
        return (1 - share) * loss + share * distances.mean()

    def _teacher_at(self, state: Tensor) -> nn.Module:
        """Return the frozen model of `state`, in evaluation mode."""
        if self._teacher is None:
            self._teacher = copy.deepcopy(self.model)
        self.layout.write(state, self._teacher)
        return self._teacher.eval()


def proximal_penalty(params: list[nn.Parameter], anchor: list[Tensor], job: TrainingJobs) -> Tensor:
    """FedProx's penalty: mu/2 ||w - W||^2, or the release's mu * sum of tensor norms."""
    is_squared = bool(job.squared)
    penalties: list[Tensor] = []  # one per parameter
    for param, start in zip(params, anchor, strict=True):
        offset = param - start
        penalty = (offset * offset).sum() if is_squared else offset.norm()
        penalties.append(penalty)
    total = torch.stack(penalties).sum()
    mu = job.mu[0]
    return mu / 2 * total if is_squared else mu * total


def make_optimizer(params: list[nn.Parameter], recipe: TrainingRecipe) -> torch.optim.Optimizer:
    """Return a fresh optimizer, as every client has one in every round."""
    if recipe.optimizer == "adam":
        return torch.optim.Adam(params, lr=recipe.lr, weight_decay=recipe.weight_decay)
    return torch.optim.SGD(
        params,
        lr=recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )
