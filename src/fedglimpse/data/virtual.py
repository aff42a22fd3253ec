"""Clients that draw their rows from a shared pool when they are looked at.

A population of a million clients cannot be dealt out: there are fewer rows than clients, and their
lists would not fit in memory. Here a client's rows are a function of (seed, client), drawn anew
whenever somebody asks and never stored, so that cost follows the clients that are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data.partition import class_pools, dirichlet_mixes, fill
from fedglimpse.errors import UserError

VIRTUAL_PARTITIONS = ("dirichlet", "label_skew", "iid")

Counts = Callable[[torch.Generator], Tensor]  # draws how many rows of each class a client has [C]


@dataclass(frozen=True, eq=False)  # compared by identity: tensors have no single ==
class VirtualRows:
    """Row numbers of every client, like a tuple of N tensors that takes no memory.

    The rows of one client are distinct; two clients may share some.
    """

    num_clients: int
    samples: int  # rows of every client
    pools: tuple[Tensor, ...]  # row numbers of each class
    counts: Counts
    seed: int

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client: int) -> Tensor:
        """Draw the rows of one client `[samples]`, the same ones every time."""
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client {client} of {self.num_clients}")
        draw = rng.generator(self.seed, "virtual-client", client)
        parts = [
            pool[torch.randperm(len(pool), generator=draw)[:count]]
            for pool, count in zip(self.pools, self.counts(draw).tolist(), strict=True)
            if count
        ]
        return torch.cat(parts)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[client] for client in range(self.num_clients))

    @property
    def sizes(self) -> Tensor:
        """Rows of every client `[N]`: one number in memory, repeated."""
        return torch.tensor(self.samples).expand(self.num_clients)


def virtual_rows(
    labels: Tensor,
    pool: Tensor,
    *,
    partition: str,
    num_clients: int,
    samples: int,
    alpha: float,
    classes_per_client: int,
    seed: int,
) -> VirtualRows:
    """Let every client draw `samples` rows with its own mix of classes.

    Args:
        labels: of all training rows.  # [n]
        pool: the rows that may be drawn.  # [p]
        partition: the mix: "dirichlet" draws it from Dir(alpha), "label_skew" takes
            `classes_per_client` random classes in equal parts, "iid" is the pool's own.
        num_clients: N.
        samples: rows of every client.
        alpha: concentration of "dirichlet".
        classes_per_client: of "label_skew".
        seed: the run's seed.

    Raises:
        UserError: for another partition, or a pool that is too small for one client.
    """
    if num_clients < 1:
        raise UserError(f"data.clients={num_clients}; give at least 1")
    if not 1 <= samples <= len(pool):
        raise UserError(
            f"data.samples={samples} for each client, but the pool has {len(pool)} rows; "
            f"give 1..{len(pool)}"
        )
    by_class = class_pools(labels[pool], rng.generator(seed, "partition"))
    totals = torch.tensor([len(part) for part in by_class])  # [C]
    if partition == "dirichlet":
        counts = _dirichlet_counts(totals, samples, alpha)
    elif partition == "label_skew":
        counts = _even_counts(totals, samples, classes_per_client)
    elif partition == "iid":
        counts = _iid_counts(totals, samples)
    else:
        raise UserError(
            f"data.partition='{partition}' deals rows out, so clients cannot draw data.samples="
            f"{samples} of their own; use {', '.join(VIRTUAL_PARTITIONS)}, or data.samples=0"
        )
    pools = tuple(pool[part] for part in by_class)
    return VirtualRows(num_clients, samples, pools, counts, seed)


def _dirichlet_counts(totals: Tensor, samples: int, alpha: float) -> Counts:
    def counts(draw: torch.Generator) -> Tensor:
        return fill(dirichlet_mixes(alpha, (1, len(totals)), draw)[0], totals, samples, draw)

    return counts


def _iid_counts(totals: Tensor, samples: int) -> Counts:
    def counts(draw: torch.Generator) -> Tensor:
        return fill(totals.double(), totals, samples, draw)

    return counts


def _even_counts(totals: Tensor, samples: int, classes_per_client: int) -> Counts:
    if not 1 <= classes_per_client <= len(totals):
        raise UserError(
            f"data.classes_per_client={classes_per_client}, but the pool has "
            f"{len(totals)} classes; give 1..{len(totals)}"
        )
    most, least = -(-samples // classes_per_client), int(totals.min())
    if samples < classes_per_client or most > least:
        raise UserError(
            f"data.samples={samples} in {classes_per_client} classes need {classes_per_client} "
            f"rows or more, and at most {least} of a class, the fewest the pool has; give "
            f"data.samples={classes_per_client}..{least * classes_per_client}"
        )
    parts = torch.full((classes_per_client,), samples // classes_per_client)
    parts[: samples % classes_per_client] += 1

    def counts(draw: torch.Generator) -> Tensor:
        chosen = torch.randperm(len(totals), generator=draw)[:classes_per_client]
        return torch.zeros_like(totals).index_copy(0, chosen, parts)

    return counts
