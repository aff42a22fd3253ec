"""All clients of a round at once: J models trained by one stack of batched operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.errors import UserError
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
from fedglimpse.simulation.trainers.objectives import blocks_of, distillation, layer_of, serpentine
from fedglimpse.simulation.trainers.optimizers import StackedOptimizer
from fedglimpse.simulation.trainers.stacked import Descent, StackedModel


@dataclass(frozen=True)
class _Wave:
    """Jobs that train together: largest first, all of the same block."""

    jobs: TrainingJobs
    state: dict[str, Tensor]  # name -> [J, *shape], trained in place
    leaves: list[str]  # names of the tensors that train
    frozen: frozenset[str]  # layers that do not
    teacher: dict[str, Tensor] | None  # name -> [J, *shape]; None where nobody distils
    learn: Descent | None  # dense layers step by themselves: plain SGD on a CPU


class BatchedTrainer:
    """Trains all jobs of all lanes together; agrees with `SerialTrainer`.

    Jobs are sorted by size, so that those still training at a given step are always the first
    ones: shorter clients drop off the end of the stack instead of being masked out. Jobs that
    train different blocks, or distil and do not, go in separate waves.
    """

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        recipe: TrainingRecipe,
        precision: Precision = "fp32",
        max_jobs: int | None = None,
    ) -> None:
        """Take the structure of `model`.

        Args:
            model: its values are not used.
            examples: the training set.
            recipe: optimizer, batch size, epochs.
            precision: of forward and backward passes.
            max_jobs: clients in memory at a time; more are trained in waves. None: no limit.

        Raises:
            UserError: where the model cannot be stacked, or `max_jobs` is not positive.
        """
        if max_jobs is not None and max_jobs < 1:
            raise UserError(f"max_jobs={max_jobs}: at least 1 client must train at a time.")
        self.stacked, self.layout = StackedModel(model), Layout.of(model)
        self.blocks = blocks_of(model)
        self.trainable = [n for n, p in model.named_parameters() if p.requires_grad]
        self.examples, self.recipe, self.precision = examples, recipe, precision
        self.max_jobs = max_jobs

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        """Train every job; the answer is in the order of `jobs`."""
        states = start.new_empty(len(jobs), self.layout.size)
        tally = LossSums(len(jobs), start.device)
        named = self.layout.unpack(start)
        for block, index in self._waves(jobs):
            index = index.to(start.device)
            wave = self._wave(named, jobs.pick(index), block)
            tally.put(index, self._train_wave(wave))
            states[index] = self.layout.pack(wave.state)
        return tally.results(states)

    def _waves(self, jobs: TrainingJobs) -> list[tuple[int, Tensor]]:
        """Return (block or -1, positions of jobs that train together), largest jobs first."""
        order = torch.argsort(jobs.sizes.cpu(), descending=True, stable=True)
        visits, distils = jobs.visit.tolist(), (jobs.distill > 0).tolist()
        groups: dict[tuple[int, bool], list[int]] = {}
        for j in order.tolist():
            block = -1 if visits[j] < 0 else serpentine(visits[j], len(self.blocks))
            groups.setdefault((block, distils[j]), []).append(j)
        return [
            (block, part)
            for (block, _), members in groups.items()
            for part in torch.tensor(members).split(self.max_jobs or len(members))
        ]

    def _wave(self, named: dict[str, Tensor], jobs: TrainingJobs, block: int) -> _Wave:
        state = {n: v[jobs.start] for n, v in named.items()}  # copies, each contiguous
        train = self.blocks[block] if block >= 0 else [n for part in self.blocks for n in part]
        leaves = [n for n in self.trainable if layer_of(n) in train]
        distils = bool((jobs.distill > 0).any())
        teacher = {n: v.clone() for n, v in state.items()} if distils else None
        frozen = self.stacked.names - frozenset(train)
        learn = Descent.at(self.recipe.lr) if self._steps_alone(jobs) else None
        if learn is not None:
            leaves = [n for n in leaves if layer_of(n) not in self.stacked.dense]
        return _Wave(jobs, state, leaves, frozen, teacher, learn)

    def _steps_alone(self, jobs: TrainingJobs) -> bool:
        """True where the step of a weight is its gradient and nothing else, on a CPU."""
        recipe = self.recipe
        plain = recipe.optimizer == "sgd" and not recipe.momentum and not recipe.weight_decay
        return plain and not bool((jobs.mu > 0).any()) and jobs.mu.device.type == "cpu"

    def _train_wave(self, wave: _Wave) -> LossSums:
        jobs, batch_size = wave.jobs, self.recipe.batch_size
        optimizer = StackedOptimizer([wave.state[n] for n in wave.leaves], self.recipe, jobs)
        tally, sizes = LossSums(len(jobs), jobs.sizes.device), jobs.sizes.cpu()
        for epoch in range(self.recipe.epochs):
            rows, draws = self.examples.order(jobs, epoch)
            for step in range(steps_per_epoch(sizes, batch_size)):
                counts = batch_counts(sizes, step, batch_size)
                active, width = int((counts > 0).sum()), int(counts.max())
                if active == 0:
                    continue
                part = (slice(active), slice(step * batch_size, step * batch_size + width))
                batch = self.examples.batch(rows[part], None if draws is None else draws[part])
                each, grads = self._gradients(wave, *batch, counts[:active])
                optimizer.step(grads)
                tally.add(part[0], each, counts[:active].to(each.device))
        return tally

    def _gradients(
        self, wave: _Wave, x: Tensor, y: Tensor, counts: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return each example's loss `[A, B]`, 0 for padding, and the gradients of the leaves."""
        active, width = y.shape
        ragged = bool((counts < width).any())
        counts = counts.to(x.device)
        valid = torch.arange(width, device=x.device) < counts[:, None] if ragged else None
        live = {n: v[:active] for n, v in wave.state.items()}
        leaves = {n: live[n].detach().requires_grad_() for n in wave.leaves}
        with numerics(x.device, self.precision):
            state = {**live, **leaves}
            logits = self.stacked.forward(x, state, valid, wave.frozen, wave.learn)  # [A, B, C]
            each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        each = each.view(y.shape)
        goal = each
        if wave.teacher is not None:
            share = wave.jobs.distill[:active, None]
            goal = (1 - share) * each + share * self._distillation(wave, x, logits)
        if valid is not None:
            each, goal = each * valid, goal * valid
        loss = goal.sum(1) / counts  # [A]
        wanted = list(leaves.values())
        if wave.learn is not None:
            loss.sum().backward(inputs=[wave.learn.token, *wanted])
            return each.detach(), [cast(Tensor, leaf.grad) for leaf in wanted]
        return each.detach(), list(torch.autograd.grad(loss.sum(), wanted))

    def _distillation(self, wave: _Wave, x: Tensor, logits: Tensor) -> Tensor:
        """Return each example's distance to what the received model says `[A, B]`."""
        assert wave.teacher is not None
        teacher = {n: v[: len(x)] for n, v in wave.teacher.items()}
        with torch.no_grad(), numerics(x.device, self.precision):
            target = self.stacked.forward(x, teacher, None, self.stacked.names)
        return distillation(logits, target, wave.jobs.temperature[: len(x)])
