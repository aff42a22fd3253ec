"""All clients of a round at once: J models trained by one stack of batched operations."""

from __future__ import annotations

from collections.abc import Mapping
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
from fedglimpse.simulation.trainers.stacked import InPlaceStep, StackedModel

WHOLE_MODEL = -1  # instead of a block's number


@dataclass(frozen=True)
class _Wave:
    """Jobs that train together: largest first, all of the same block."""

    jobs: TrainingJobs
    state: dict[str, Tensor]  # name -> [J, *shape], trained in place
    leaves: list[str]  # names of the tensors that the optimizer updates
    frozen: frozenset[str]  # layers that do not train
    teacher: dict[str, Tensor] | None  # name -> [J, *shape]; None where no job distils
    dense_step: InPlaceStep | None  # dense layers step in their backward pass; None: like others


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
            raise UserError(
                f"max_jobs={max_jobs}: at least 1 client must train at a time.",
                key="engine.max_jobs",
            )
        self.stacked = StackedModel(model)
        self.layout = Layout.of(model)
        self.blocks = blocks_of(model)
        self.trainable = [name for name, p in model.named_parameters() if p.requires_grad]
        self.examples = examples
        self.recipe = recipe
        self.precision = precision
        self.max_jobs = max_jobs

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        """Train every job; results are in the order of `jobs`."""
        states = start.new_empty(len(jobs), self.layout.size)
        sums = LossSums(len(jobs), start.device)
        named_start = self.layout.unpack(start)
        for block, index in self._waves(jobs):
            index = index.to(start.device)
            wave = self._prepared(named_start, jobs.pick(index), block)
            sums.put(index, self._train_wave(wave))
            states[index] = self.layout.pack(wave.state)
        return sums.results(states)

    def _waves(self, jobs: TrainingJobs) -> list[tuple[int, Tensor]]:
        """Return (block, positions of jobs that train together), largest jobs first."""
        by_size = torch.argsort(jobs.sizes.cpu(), descending=True, stable=True)
        visits = jobs.visit.tolist()
        distils = (jobs.distill > 0).tolist()
        groups: dict[tuple[int, bool], list[int]] = {}
        for j in by_size.tolist():
            block = WHOLE_MODEL if visits[j] < 0 else serpentine(visits[j], len(self.blocks))
            groups.setdefault((block, distils[j]), []).append(j)

        waves: list[tuple[int, Tensor]] = []
        for (block, _), members in groups.items():
            for index in torch.tensor(members).split(self.max_jobs or len(members)):
                waves.append((block, index))
        return waves

    def _prepared(self, named_start: dict[str, Tensor], jobs: TrainingJobs, block: int) -> _Wave:
        """Copy the start states of some jobs, and decide what trains and how."""
        state = {name: value[jobs.start] for name, value in named_start.items()}  # contiguous
        teacher = None
        if bool((jobs.distill > 0).any()):
            teacher = {name: value.clone() for name, value in state.items()}

        trained_blocks = self.blocks if block == WHOLE_MODEL else [self.blocks[block]]
        trained_layers: frozenset[str] = frozenset().union(*trained_blocks)
        dense_step = None
        optimized_layers = trained_layers
        if self._dense_layers_can_step(jobs):
            dense_step = InPlaceStep.of_size(self.recipe.lr)
            optimized_layers = trained_layers - self.stacked.dense
        return _Wave(
            jobs=jobs,
            state=state,
            leaves=[name for name in self.trainable if layer_of(name) in optimized_layers],
            frozen=self.stacked.names - trained_layers,
            teacher=teacher,
            dense_step=dense_step,
        )

    def _dense_layers_can_step(self, jobs: TrainingJobs) -> bool:
        """True where the step of a weight is its gradient and nothing else, on a CPU."""
        if not self.recipe.is_plain_sgd or jobs.mu.device.type != "cpu":
            return False
        return not bool((jobs.mu > 0).any())

    def _train_wave(self, wave: _Wave) -> LossSums:
        """Train the state of a wave in place."""
        jobs = wave.jobs
        batch_size = self.recipe.batch_size
        params = [wave.state[name] for name in wave.leaves]
        optimizer = StackedOptimizer(params, self.recipe, jobs)
        sums = LossSums(len(jobs), jobs.sizes.device)
        sizes = jobs.sizes.cpu()
        for epoch in range(self.recipe.epochs):
            rows, draws = self.examples.order(jobs, epoch)
            for step in range(steps_per_epoch(sizes, batch_size)):
                counts = batch_counts(sizes, step, batch_size)
                active = int((counts > 0).sum())  # the first ones, for jobs are sorted by size
                width = int(counts.max())
                if active == 0:
                    continue
                counts = counts[:active]
                first = step * batch_size
                cells = (slice(active), slice(first, first + width))
                batch_draws = None if draws is None else draws[cells]
                x, y = self.examples.batch(rows[cells], batch_draws)
                losses, grads = self._gradients(wave, x, y, counts)
                optimizer.step(grads)
                sums.add(slice(active), losses, counts.to(losses.device))
        return sums

    def _gradients(
        self, wave: _Wave, x: Tensor, y: Tensor, counts: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Return each example's loss `[A, B]`, 0 for padding, and the gradients of the leaves.

        Args:
            wave: of which the first A jobs are still training.
            x: their inputs.  # [A, B, *shape]
            y: their labels.  # [A, B]
            counts: real examples of each of them, on the CPU.  # [A]
        """
        active, width = y.shape
        has_padding = bool((counts < width).any())
        counts = counts.to(x.device)
        valid = None
        if has_padding:
            valid = torch.arange(width, device=x.device) < counts[:, None]  # [A, B]

        state = _first_jobs(wave.state, active)
        leaves: list[Tensor] = []
        for name in wave.leaves:
            state[name] = state[name].detach().requires_grad_()
            leaves.append(state[name])
        with numerics(x.device, self.precision):
            logits = self.stacked.forward(x, state, valid, wave.frozen, wave.dense_step)
            flat_losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        losses = flat_losses.view(y.shape)

        minimised = losses
        if wave.teacher is not None:
            share = wave.jobs.distill[:active, None]
            distance = self._distance_to_teacher(wave.teacher, x, logits, wave.jobs.temperature)
            minimised = (1 - share) * losses + share * distance
        if valid is not None:
            losses = losses * valid
            minimised = minimised * valid
        loss = (minimised.sum(1) / counts).sum()

        if wave.dense_step is None:
            return losses.detach(), list(torch.autograd.grad(loss, leaves))
        # The token makes every dense layer's backward pass run. It gets no gradient itself, which
        # torch.autograd.grad would refuse.
        loss.backward(inputs=[wave.dense_step.token, *leaves])
        return losses.detach(), [cast(Tensor, leaf.grad) for leaf in leaves]

    def _distance_to_teacher(
        self, teacher: dict[str, Tensor], x: Tensor, logits: Tensor, temperature: Tensor
    ) -> Tensor:
        """Return each example's distillation loss `[A, B]`; jobs distil from their start."""
        active = len(x)
        state = _first_jobs(teacher, active)
        with torch.no_grad(), numerics(x.device, self.precision):
            target = self.stacked.forward(x, state, None, frozen=self.stacked.names)
        return distillation(logits, target, temperature[:active])


def _first_jobs(state: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return views of the first jobs' tensors, name -> [count, *shape]."""
    return {name: value[:count] for name, value in state.items()}
