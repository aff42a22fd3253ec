"""What a local trainer is given and what it returns, the same for every trainer.

A job is the local training of one client in one round. `TrainingJobs` holds the jobs of all lanes
as tensors with one entry per job; a `LocalTrainer` turns them into `TrainingResults`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data.dataset import as_input, crop_and_flip
from fedglimpse.types import LocalObjective

Optimizer = Literal["sgd", "adam"]

CROP_PAD = 4  # pixels of zero padding around an augmented image
_CROP_OFFSETS = 2 * CROP_PAD + 1  # positions of a crop along one side
_AUGMENT = 1 << 20  # separates augmentation draws from the shuffles of the same key


@dataclass(frozen=True)
class TrainingRecipe:
    """How a client trains: one optimizer, fresh in every round."""

    optimizer: Optimizer = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 64
    epochs: int = 3
    augment: bool = False  # random crop and horizontal flip (images only)

    @property
    def is_plain_sgd(self) -> bool:
        """True where a step is the gradient times a constant, whatever came before."""
        is_sgd = self.optimizer == "sgd"
        return is_sgd and self.momentum == 0 and self.weight_decay == 0


@dataclass(frozen=True)
class JobsSummary:
    """What a trainer on a GPU has to know about its jobs before it starts."""

    most_rows: int  # of any job
    any_proximal: bool  # some job has a proximal weight
    all_squared: bool  # every job has the squared penalty
    any_special: bool  # some job distils or trains a single block

    @staticmethod
    def of(jobs: TrainingJobs) -> JobsSummary:
        """Compute it from the jobs, which waits for their device."""
        distils = jobs.distill > 0
        trains_block = jobs.visit >= 0
        is_special = distils | trains_block
        is_proximal = jobs.mu > 0
        most_rows = int(jobs.sizes.max()) if len(jobs) else 0
        return JobsSummary(
            most_rows=most_rows,
            any_proximal=bool(is_proximal.any()),
            all_squared=bool(jobs.squared.all()),
            any_special=bool(is_special.any()),
        )

    @staticmethod
    def of_objectives(objectives: Sequence[LocalObjective], most_rows: int) -> JobsSummary:
        """Compute it from what the jobs minimise."""
        return JobsSummary(
            most_rows=most_rows,
            any_proximal=any(goal.proximal_mu > 0 for goal in objectives),
            all_squared=all(goal.proximal_squared for goal in objectives),
            any_special=any(goal.distill > 0 or goal.block_cycle for goal in objectives),
        )


@dataclass(frozen=True)
class TrainingJobs:
    """Local trainings to do, of all lanes. Padding in `rows` is never read."""

    start: Tensor  # [J] row of the start states
    keys: Tensor  # [J] int64, the randomness of (seed, round, client)
    rows: Tensor  # [J, n] rows of the training set, padded
    sizes: Tensor  # [J] valid entries of `rows`
    mu: Tensor  # [J] proximal weight
    squared: Tensor  # [J] bool: squared proximal penalty, or the sum of plain norms
    distill: Tensor  # [J] share of the loss that is distillation from the start state
    temperature: Tensor  # [J] of the distillation
    visit: Tensor  # [J] int64 counter that says which block trains; -1: the whole model
    objectives: Sequence[LocalObjective] = ()  # of all jobs, which spares a GPU a wait; or unknown

    @cached_property
    def summary(self) -> JobsSummary:
        """What a trainer on a GPU has to know before it starts."""
        if not self.objectives:
            return JobsSummary.of(self)
        return JobsSummary.of_objectives(self.objectives, most_rows=self.rows.shape[1])

    @staticmethod
    def plain(rows: Tensor, keys: Tensor) -> TrainingJobs:
        """Return jobs of equal size that start from row 0 and minimise nothing but their loss.

        Args:
            rows: of the training set, no padding.  # [J, n]
            keys: int64, one for each job.  # [J]
        """
        count, width = rows.shape
        zeros = torch.zeros(count, device=rows.device)
        ones = torch.ones_like(zeros)
        return TrainingJobs(
            start=zeros.long(),
            keys=keys,
            rows=rows,
            sizes=torch.full_like(keys, width),
            mu=zeros,
            squared=ones.bool(),
            distill=zeros,
            temperature=ones,
            visit=-ones.long(),
        )

    def __len__(self) -> int:
        return len(self.start)

    def pick(self, index: Tensor) -> TrainingJobs:
        """Return the jobs at these positions, in this order, with no more padding than needed."""
        sizes = self.sizes[index]
        most_rows = int(sizes.max()) if len(sizes) else 0
        rows = self.rows[index]
        return TrainingJobs(
            start=self.start[index],
            keys=self.keys[index],
            rows=rows[:, :most_rows],
            sizes=sizes,
            mu=self.mu[index],
            squared=self.squared[index],
            distill=self.distill[index],
            temperature=self.temperature[index],
            visit=self.visit[index],
        )

    def to(self, device: torch.device) -> TrainingJobs:
        """Move every tensor to `device`."""
        moved: dict[str, Any] = {}
        for name, value in self.tensors().items():
            moved[name] = value.to(device)
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that has an entry for each job."""
        tensors: dict[str, Tensor] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                tensors[name] = value
        return tensors


@dataclass(frozen=True)
class TrainingResults:
    """Results of jobs, in their order. Losses are of the labels alone, without penalties."""

    states: Tensor  # [J, d] local states after training
    loss: Tensor  # [J] mean loss over all batches and epochs; 0 where no step was taken
    squared_loss: Tensor  # [J] mean squared loss of an example over all batches and epochs
    steps: Tensor  # [J] optimizer steps taken


class LossSums:
    """Running sums of the losses that jobs meet while they train, one entry per job."""

    def __init__(self, jobs: int, device: torch.device) -> None:
        """Start at zero for every job."""
        self.loss = torch.zeros(jobs, device=device)  # of batches
        self.squared = torch.zeros_like(self.loss)  # of examples
        self.steps = torch.zeros_like(self.loss, dtype=torch.long)
        self.examples = torch.zeros_like(self.steps)

    def tensors(self) -> list[Tensor]:
        """Return all sums."""
        return list(vars(self).values())

    def add(self, index: int | slice | Tensor, losses: Tensor, counts: Tensor) -> None:
        """Add one batch of the jobs at `index`.

        Args:
            index: positions of the jobs, all different.
            losses: of every example, 0 for padding.  # [B] for one job, else [A, B]
            counts: real examples in the batch, 0 for an idle job.  # [A] or, for one job, []
        """
        num_examples = counts.clamp(min=1)
        self.loss[index] += losses.sum(-1) / num_examples
        self.squared[index] += losses.square().sum(-1)
        self.steps[index] += counts > 0
        self.examples[index] += counts

    def put(self, index: Tensor, other: LossSums) -> None:
        """Copy the sums of `other` to the jobs at these positions."""
        for sums, other_sums in zip(self.tensors(), other.tensors(), strict=True):
            sums[index] = other_sums

    def first(self, jobs: int) -> LossSums:
        """Return a copy of the sums of the first jobs."""
        copied = LossSums(jobs, self.loss.device)
        for name, value in vars(self).items():
            setattr(copied, name, value[:jobs].clone())
        return copied

    def results(self, states: Tensor) -> TrainingResults:
        """Return the mean losses together with the trained states `[J, d]`."""
        num_batches = self.steps.clamp(min=1)
        num_examples = self.examples.clamp(min=1)
        return TrainingResults(
            states=states,
            loss=self.loss / num_batches,
            squared_loss=self.squared / num_examples,
            steps=self.steps,
        )


class LocalTrainer(Protocol):
    """Trains every job from its own start state."""

    def train(self, start: Tensor, jobs: TrainingJobs) -> TrainingResults:
        """Run all jobs.

        Args:
            start: states to train from; several jobs may share a row.  # [S, d]
            jobs: what to train.
        """


class Batch(NamedTuple):
    """The next examples of the A jobs that still train, padded to those of the largest."""

    x: Tensor  # [A, B, *shape]
    y: Tensor  # [A, B]
    counts: Tensor  # real examples of each job, on the CPU  # [A]


@dataclass(frozen=True)
class Examples:
    """The training set on its device, and how batches are drawn from it."""

    x: Tensor  # [n, *shape] uint8 or float32
    y: Tensor  # [n]
    augment: bool

    def batches(self, jobs: TrainingJobs, recipe: TrainingRecipe) -> Iterator[Batch]:
        """Yield the batches of all epochs.

        A batch of a single example is left out: BatchNorm has no variance there. So a client with
        one example takes no step at all and returns the model it was given.

        Args:
            jobs: the largest first, so that those that still train are always the first ones.
            recipe: batch size and epochs.
        """
        sizes = jobs.sizes.cpu()
        most_rows = jobs.rows.shape[1]
        for epoch in range(recipe.epochs):
            rows, draws = self.order(jobs, epoch)
            for first in range(0, most_rows, recipe.batch_size):
                counts = (sizes - first).clamp(max=recipe.batch_size)
                counts = counts[counts > 1]  # [A]
                active = len(counts)
                if active == 0:
                    break
                columns = slice(first, first + int(counts[0]))
                cells = (slice(active), columns)
                batch_draws = None if draws is None else draws[cells]
                x, y = self.batch(rows[cells], batch_draws)
                yield Batch(x, y, counts)

    def order(self, jobs: TrainingJobs, epoch: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this epoch's order of every job's rows and its augmentation draws `[J, n]`.

        Draws belong to the rows, not to their place in the order; None without augmentation.
        """
        width = jobs.rows.shape[1]
        order = rng.permutations(jobs.keys, epoch, jobs.sizes, width)
        rows = jobs.rows.gather(1, order)
        if not self.augment:
            return rows, None
        draws = rng.hashed(jobs.keys, _AUGMENT + epoch, width)
        return rows, draws.gather(1, order)

    def batch(self, rows: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gather float inputs and labels of `rows` (any shape), augmented by `draws`."""
        flat_rows = rows.reshape(-1)
        x = self.x[flat_rows]
        if not x.is_floating_point():
            x = as_input(x)
        y = self.y[flat_rows]
        if draws is not None:
            flat_draws = draws.reshape(-1)
            x = _augmented(x, flat_draws)
        example_shape = x.shape[1:]
        return x.view(*rows.shape, *example_shape), y.view(rows.shape)


def _augmented(x: Tensor, draws: Tensor) -> Tensor:
    """Crop and flip every image by its own draw, a large random integer."""
    top = draws % _CROP_OFFSETS
    left = (draws // _CROP_OFFSETS) % _CROP_OFFSETS
    flipped = (draws // _CROP_OFFSETS**2) % 2 == 1
    corners = torch.stack([top, left], dim=1)
    return crop_and_flip(x, corners, flipped, pad=CROP_PAD)
