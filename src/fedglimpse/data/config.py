"""The settings `data.*`, and the names they may have.

Imports no torch, so that a mistake is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedglimpse.data.partition import PARTITIONS
from fedglimpse.fields import setting

DATASETS = ("digits", "synthetic", "cifar10", "fashion", "har", "hapt")


@dataclass(frozen=True)
class DataConfig:
    """`data.*`: which examples, and who holds them."""

    name: str = setting(
        "digits", 'a dataset, or your own as "pkg.mod:factory"', choices=DATASETS, plugin=True
    )
    partition: str = setting(
        "dirichlet",
        "how training rows are split among clients, see docs/data.md",
        choices=tuple(PARTITIONS),
        plugin=True,
    )
    clients: int = setting(
        100,
        "N, clients in all; 0 with partition=subject: one for each subject",
        at_least=0,
        at_most=10**9,
    )
    classes_per_client: int = setting(
        2, "of label_skew: classes that each client holds", at_least=1
    )
    exact_classes: bool = setting(True, "label_skew: exactly so many classes; false: random shards")
    alpha: float = setting(
        0.1, "concentration of dirichlet: the smaller, the fewer classes at a client", above=0
    )
    equal_size: bool = setting(True, "dirichlet: all clients the same size, as in the paper")
    min_size: int = setting(
        10, "dirichlet with unequal sizes: the smallest client allowed", at_least=1
    )
    samples: int = setting(
        0, "rows every client draws from a shared pool when seen; 0: rows are dealt out", at_least=0
    )
    proxy: int = setting(
        -1, "examples of the server's proxy set; -1: 1,000, fewer for small data", at_least=-1
    )
    proxy_source: str = setting(
        "heldout",
        "heldout from clients; leaky_train: shared, as in the release",
        choices=("heldout", "leaky_train"),
    )

    @property
    def by_subject(self) -> bool:
        """True where every client is one subject."""
        partition = PARTITIONS.get(self.partition)  # None: a user's own
        return partition is not None and partition.by_subject
