"""All clients of a round at once: J models trained by one stack of batched operations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.errors import UserError
from fedglimpse.federation.devices import Precision, numerics
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.trainers.jobs import (
    Batch,
    Examples,
    LossSums,
    TrainingJobs,
    TrainingRecipe,
    TrainingResults,
)
from fedglimpse.simulation.trainers.objectives import blocks_of, distillation, layer_of, serpentine
from fedglimpse.simulation.trainers.optimizers import StackedOptimizer
from fedglimpse.simulation.trainers.stacked import InPlaceStep, StackedModel


@dataclass(frozen=True)
class _Part:
    """What of the model trains: all of it, or one block."""

    frozen: frozenset[str]  # layers that do not train
    leaves: list[str]  # names of the tensors that train
    leaves_beside_dense: list[str]  # those of layers that cannot step in their backward pass


@dataclass(frozen=True)
class _Wave:
    """Jobs that train together: largest first, all of the same part."""

    jobs: TrainingJobs
    state: dict[str, Tensor]  # name -> [J, *shape], trained in place
    teacher: dict[str, Tensor] | None  # name -> [J, *shape]; None where no job distils
    leaves: list[str]  # names of the tensors that the optimizer updates
    frozen: frozenset[str]  # layers that do not train
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
        self.examples = examples
        self.recipe = recipe
        self.numerics = numerics(examples.y.device, precision)
        self.max_jobs = max_jobs

        self._trainable: list[str] = []  # names of tensors
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._trainable.append(name)
        blocks = blocks_of(model)
        self._blocks = [self._part(block) for block in blocks]
        every_layer: frozenset[str] = frozenset().union(*blocks)
        self._whole = self._part(every_layer)

        # Where the step of a weight is its gradient and nothing else, on a CPU.
        self._dense_step: InPlaceStep | None = None
        if recipe.is_plain_sgd and examples.y.device.type == "cpu":
            token = torch.zeros((), requires_grad=True)
            self._dense_step = InPlaceStep(recipe.lr, token)

    def _part(self, layers: Collection[str]) -> _Part:
        """Return what trains where only these layers do."""
        trained_layers = frozenset(layers)
        leaves: list[str] = []
        leaves_beside_dense: list[str] = []
        for name in self._trainable:
            layer = layer_of(name)
            if layer not in trained_layers:
                continue
            leaves.append(name)
            if layer not in self.stacked.dense:
                leaves_beside_dense.append(name)
        frozen = self.stacked.names - trained_layers
        return _Part(frozen, leaves, leaves_beside_dense)

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        """Train every job; results are in the order of `jobs`."""
        num_jobs = jobs.start.shape[0]
        states = start.new_empty(num_jobs, self.layout.size)
        sums = LossSums(num_jobs, start.device)
        named_start = self.layout.unpack(start)
        for part, positions in self._waves(jobs):
            positions = positions.to(start.device)
            wave_jobs = jobs.pick(positions)
            states[positions] = self._train_wave(named_start, wave_jobs, part, positions, sums)
        return sums.results(states)

    def _waves(self, jobs: TrainingJobs) -> list[tuple[_Part, Tensor]]:
        """Return what trains and the positions of jobs that train together, largest jobs first."""
        sizes = jobs.sizes.cpu()
        by_size = torch.argsort(sizes, descending=True, stable=True)
        visits = jobs.visit.tolist()
        shares = jobs.distill.tolist()
        groups: dict[tuple[int | None, bool], list[int]] = {}
        for j in by_size.tolist():
            block = None  # the whole model
            if visits[j] >= 0:
                block = serpentine(visits[j], len(self._blocks))
            distils = shares[j] > 0
            group = groups.setdefault((block, distils), [])
            group.append(j)

        waves: list[tuple[_Part, Tensor]] = []
        for (block, _), group in groups.items():
            part = self._whole if block is None else self._blocks[block]
            largest = self.max_jobs or len(group)
            for positions in torch.tensor(group).split(largest):
                waves.append((part, positions))
        return waves

    def _train_wave(
        self,
        named_start: dict[str, Tensor],
        jobs: TrainingJobs,
        part: _Part,
        positions: Tensor,
        sums: LossSums,
    ) -> Tensor:
        """Return the trained states `[J, d]` of jobs; add to the sums at their positions."""
        state = {name: value[jobs.start] for name, value in named_start.items()}  # contiguous
        teacher = None
        distils = jobs.distill > 0
        if bool(distils.any()):
            teacher = {name: value.clone() for name, value in state.items()}
        dense_step = self._dense_step
        is_proximal = jobs.mu > 0
        if bool(is_proximal.any()):
            dense_step = None
        leaves = part.leaves if dense_step is None else part.leaves_beside_dense
        wave = _Wave(jobs, state, teacher, leaves, part.frozen, dense_step)
        params = [state[name] for name in leaves]
        optimizer = StackedOptimizer(params, self.recipe, jobs)
        for batch in self.examples.batches(jobs, self.recipe):
            losses, grads = self._gradients(wave, batch)
            optimizer.step(grads)
            counts = batch.counts.to(losses.device)
            active = len(counts)  # the first ones, for jobs are sorted by size
            sums.add(positions[:active], losses, counts)
        return self.layout.pack(state)

    def _gradients(self, wave: _Wave, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return each example's loss `[A, B]`, 0 for padding, and the gradients of the leaves.

        Args:
            wave: of which the first A jobs are still training.
            batch: their examples.
        """
        x = batch.x
        y = batch.y
        active, width = y.shape
        counts = batch.counts.to(x.device)
        valid = None
        has_padding = batch.counts < width
        if bool(has_padding.any()):
            columns = torch.arange(width, device=x.device)
            valid = columns < counts[:, None]  # [A, B]

        state = {name: value[:active] for name, value in wave.state.items()}
        leaves: list[Tensor] = []
        for name in wave.leaves:
            leaf = state[name].detach()
            leaf.requires_grad_()
            state[name] = leaf
            leaves.append(leaf)
        with self.numerics:
            logits = self.stacked.forward(x, state, valid, wave.frozen, wave.dense_step)
            flat_logits = logits.flatten(0, 1)
            flat_losses = F.cross_entropy(flat_logits, y.flatten(), reduction="none")
        losses = flat_losses.view(y.shape)

        minimised = losses
        if wave.teacher is not None:
            share = wave.jobs.distill[:active, None]
            distance = self._distance_to_teacher(wave.teacher, x, logits, wave.jobs.temperature)
            minimised = (1 - share) * losses + share * distance
        if valid is not None:
            losses = losses * valid
            minimised = minimised * valid
        job_losses = minimised.sum(1) / counts
        loss = job_losses.sum()

        losses = losses.detach()
        if wave.dense_step is None:
            grads = torch.autograd.grad(loss, leaves)
            return losses, list(grads)
        # The token makes every dense layer's backward pass run. It gets no gradient itself, which
        # torch.autograd.grad would refuse.
        loss.backward(inputs=[wave.dense_step.token, *leaves])
        return losses, [cast(Tensor, leaf.grad) for leaf in leaves]

    def _distance_to_teacher(
        self, teacher: dict[str, Tensor], x: Tensor, logits: Tensor, temperature: Tensor
    ) -> Tensor:
        """Return each example's distillation loss `[A, B]`; jobs distil from their start."""
        active = len(x)
        state = {name: value[:active] for name, value in teacher.items()}
        with torch.no_grad(), self.numerics:
            target = self.stacked.forward(x, state, frozen=self.stacked.names)
        return distillation(logits, target, temperature[:active])
