"""Clients that draw their rows from a shared pool when they are looked at.

A million clients cannot each have rows of their own: there are fewer rows than clients, and their
lists would not fit in memory. Here a client's rows are a function of (seed, client), drawn again
whenever they are read and never stored, so that cost follows the clients that are seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data.config import DataConfig
from fedglimpse.data.partition import (
    PARTITIONS,
    DrawCounts,
    PartitionKind,
    class_pools,
    class_sizes,
)
from fedglimpse.errors import UserError, require


@dataclass(frozen=True, eq=False)  # compared by identity: tensors have no single ==
class VirtualRows:
    """Row numbers of every client, like a tuple of N tensors that takes no memory.

    The rows of one client are distinct; two clients may share some.
    """

    num_clients: int
    samples: int  # rows of every client
    pools: tuple[Tensor, ...]  # row numbers of each class
    draw_counts: DrawCounts
    seed: int

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client: int) -> Tensor:
        """Draw the rows of one client `[samples]`, the same ones every time."""
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client {client} of {self.num_clients}")
        generator = rng.generator(self.seed, "virtual-client", client)
        counts = self.draw_counts(generator).tolist()
        rows = []
        for pool, count in zip(self.pools, counts, strict=True):
            if count:
                rows.append(pool[torch.randperm(len(pool), generator=generator)[:count]])
        return torch.cat(rows)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[client] for client in range(self.num_clients))

    @property
    def sizes(self) -> Tensor:
        """Rows of every client `[N]`: one number in memory, repeated."""
        return torch.tensor(self.samples).expand(self.num_clients)


def virtual_rows(
    labels: Tensor, pool: Tensor, kind: PartitionKind, settings: DataConfig, seed: int
) -> VirtualRows:
    """Let every client draw `data.samples` rows with its own mix of classes.

    Args:
        labels: of all training rows.  # [n]
        pool: the rows that may be drawn.  # [p]
        kind: the partition, which says how a client's mix is drawn.
        settings: `data.*`.
        seed: the run's seed.

    Raises:
        UserError: for a partition that has no such mix, or a pool too small for one client.
    """
    samples = settings.samples
    require(
        samples <= len(pool),
        f"data.samples={samples} for each client, but the pool has {len(pool)} rows: give 1 to "
        f"{len(pool)}.",
        key="data.samples",
    )
    if kind.mix is None:
        drawable = [name for name, known in PARTITIONS.items() if known.mix]
        raise UserError(
            f"data.partition={settings.partition} deals rows out, so clients cannot draw "
            f"data.samples={samples} of their own: use {', '.join(drawable)}, or data.samples=0.",
            key="data.partition",
        )
    by_class = class_pools(labels[pool], rng.generator(seed, "partition"))
    draw_counts = kind.mix(class_sizes(by_class), settings)
    pools = tuple(pool[rows] for rows in by_class)
    return VirtualRows(settings.clients, samples, pools, draw_counts, seed)
