"""What a local trainer is asked and what it answers, the same for every trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Protocol

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
class Jobs:
    """Local trainings to do, of all lanes. Padding in `rows` is never read."""

    lane: Tensor  # [J] row of the start states
    keys: Tensor  # [J] int64, the randomness of (seed, round, client)
    rows: Tensor  # [J, n] rows of the training set, padded
    sizes: Tensor  # [J] valid entries of `rows`
    mu: Tensor  # [J] proximal weight
    squared: Tensor  # [J] bool: squared proximal penalty, or the sum of plain norms

    def __len__(self) -> int:
        return len(self.lane)

    def pick(self, index: Tensor) -> Jobs:
        """Return the jobs at these positions, in this order."""
        return Jobs(
            self.lane[index],
            self.keys[index],
            self.rows[index],
            self.sizes[index],
            self.mu[index],
            self.squared[index],
        )

    def to(self, device: torch.device) -> Jobs:
        """Move every tensor to `device`."""
        return replace(self, **{k: v.to(device) for k, v in vars(self).items()})


@dataclass(frozen=True)
class Trained:
    """What came of the jobs, in their order."""

    states: Tensor  # [J, d] local states after training
    loss: Tensor  # [J] mean loss over all batches and epochs; 0 where no step was taken
    steps: Tensor  # [J] optimizer steps taken


class LocalTrainer(Protocol):
    """Trains every job from its lane's start state."""

    def train(self, start: Tensor, jobs: Jobs) -> Trained:
        """Run all jobs.

        Args:
            start: global states, one row for each lane.  # [R, d]
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

    def order(self, jobs: Jobs, epoch: int) -> tuple[Tensor, Tensor | None]:
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
