"""What a local trainer is asked and what it answers, the same for every trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data.dataset import as_input, crop_and_flip

Optimizer = Literal["sgd", "adam"]

CROP_PAD = 4  # pixels of zero padding around an augmented image
_AUGMENT = 1 << 20  # separates augmentation draws from the shuffles of the same key


@dataclass(frozen=True)
class Recipe:
    """How a client trains: one optimizer, fresh in every round."""

    optimizer: Optimizer = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 64
    epochs: int = 3
    augment: bool = False  # random crop and horizontal flip (images only)


@dataclass(frozen=True)
class Outline:
    """What a trainer has to know of its jobs before it starts."""

    longest: int  # rows of the largest
    pulled: bool  # one of them has a proximal weight
    squared: bool  # all have the squared penalty
    special: bool  # one of them distils or trains a single block

    @staticmethod
    def of(jobs: Jobs) -> Outline:
        """Read it off the jobs, which waits for their device."""
        return Outline(
            longest=int(jobs.sizes.max()) if len(jobs) else 0,
            pulled=bool((jobs.mu > 0).any()),
            squared=bool(jobs.squared.all()),
            special=bool((jobs.distill > 0).any() | (jobs.visit >= 0).any()),
        )


@dataclass(frozen=True)
class Jobs:
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
    known: Outline | None = None  # where whoever made them knows it already

    @property
    def outline(self) -> Outline:
        """What there is to know before the start."""
        return self.known or Outline.of(self)

    @staticmethod
    def plain(rows: Tensor, keys: Tensor) -> Jobs:
        """Return jobs of equal size that start from row 0 and minimise nothing but their loss.

        Args:
            rows: of the training set, no padding.  # [J, n]
            keys: int64, one for each job.  # [J]
        """
        like = torch.zeros(len(rows), device=rows.device)
        return Jobs(
            start=like.long(),
            keys=keys,
            rows=rows,
            sizes=torch.full_like(keys, rows.shape[1]),
            mu=like,
            squared=like == 0,
            distill=like,
            temperature=like + 1,
            visit=like.long() - 1,
        )

    def __len__(self) -> int:
        return len(self.start)

    def pick(self, index: Tensor) -> Jobs:
        """Return the jobs at these positions, in this order, with no more padding than needed."""
        picked: dict[str, Any] = {k: v[index] for k, v in self.tensors().items()}
        some = replace(self, known=None, **picked)
        outline = some.outline
        return replace(some, rows=some.rows[:, : outline.longest], known=outline)

    def to(self, device: torch.device) -> Jobs:
        """Move every tensor to `device`."""
        moved: dict[str, Any] = {k: v.to(device) for k, v in self.tensors().items()}
        return replace(self, **moved)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that has an entry for each job."""
        return {k: v for k, v in vars(self).items() if isinstance(v, Tensor)}


@dataclass(frozen=True)
class Trained:
    """What came of the jobs, in their order. Losses are of the labels alone, without penalties."""

    states: Tensor  # [J, d] local states after training
    loss: Tensor  # [J] mean loss over all batches and epochs; 0 where no step was taken
    squared_loss: Tensor  # [J] mean squared loss of an example over all batches and epochs
    steps: Tensor  # [J] optimizer steps taken


class Tally:
    """Running sums of the losses that jobs meet while they train."""

    def __init__(self, jobs: int, device: torch.device) -> None:
        """Start at zero for every job."""
        self.loss, self.squared = torch.zeros(2, jobs, device=device)  # [J] each
        self.steps, self.examples = torch.zeros(2, jobs, device=device, dtype=torch.long)

    def add(self, part: int | slice, each: Tensor, counts: Tensor) -> None:
        """Take in one batch of some jobs.

        Args:
            part: which jobs.
            each: loss of every example, 0 for padding.  # [B] for one job, else [A, B]
            counts: real examples in the batch, 0 for a job that rests.  # [A] or, for one job, []
        """
        self.loss[part] += each.sum(-1) / counts.clamp(min=1)
        self.squared[part] += each.square().sum(-1)
        self.steps[part] += counts > 0
        self.examples[part] += counts

    def put(self, index: Tensor, other: Tally) -> None:
        """Take over the sums of `other` as those of the jobs at these positions."""
        for name, value in vars(other).items():
            getattr(self, name)[index] = value

    def first(self, jobs: int) -> Tally:
        """Return a copy of the sums of the first jobs."""
        some = Tally(jobs, self.loss.device)
        for name, value in vars(self).items():
            setattr(some, name, value[:jobs].clone())
        return some

    def over(self, states: Tensor) -> Trained:
        """Return the means, beside the trained states `[J, d]`."""
        loss = self.loss / self.steps.clamp(min=1)
        squared = self.squared / self.examples.clamp(min=1)
        return Trained(states, loss, squared, self.steps)


class LocalTrainer(Protocol):
    """Trains every job from its own start state."""

    def train(self, start: Tensor, jobs: Jobs) -> Trained:
        """Run all jobs.

        Args:
            start: states to train from; several jobs may share a row.  # [S, d]
            jobs: what to train.
        """


def batch_counts(sizes: Tensor, step: int, batch_size: int) -> Tensor:
    """Return how many examples each job has in batch `step` of an epoch `[J]`.

    A batch of a single example is left out: BatchNorm has no variance there. So a client with
    one example takes no step at all and returns the model it was given.
    """
    counts = (sizes - step * batch_size).clamp(0, batch_size)
    return counts.masked_fill(counts == 1, 0)


def steps_per_epoch(sizes: Tensor, batch_size: int) -> int:
    """Return the number of batches of the largest job."""
    return -(-int(sizes.max()) // batch_size) if len(sizes) else 0


@dataclass(frozen=True)
class Examples:
    """The training set on its device, and how batches are drawn from it."""

    x: Tensor  # [n, *shape] uint8 or float32
    y: Tensor  # [n]
    augment: bool

    def order(self, jobs: Jobs, epoch: int | Tensor) -> tuple[Tensor, Tensor | None]:
        """Return this epoch's order of every job's rows and its augmentation draws `[J, n]`."""
        width = jobs.rows.shape[1]
        order = rng.permutations(jobs.keys, epoch, jobs.sizes, width)
        draws = rng.hashed(jobs.keys, _AUGMENT + epoch, width) if self.augment else None
        rows = jobs.rows.gather(1, order)
        return rows, None if draws is None else draws.gather(1, order)

    def batch(self, rows: Tensor, draws: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gather float inputs and labels of `rows` (any shape), augmented where `draws` say."""
        flat = rows.reshape(-1)
        x = as_input(self.x[flat])
        if draws is not None:
            v, side = draws.reshape(-1), 2 * CROP_PAD + 1
            offsets = torch.stack([v % side, (v // side) % side], dim=1)
            x = crop_and_flip(x, offsets, (v // side**2) % 2 == 1, pad=CROP_PAD)
        return x.view(*rows.shape, *x.shape[1:]), self.y[flat].view(rows.shape)
