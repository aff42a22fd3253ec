"""Who holds which rows of a dataset, with the proxy rows that the server keeps for itself.

`build_population` is where to begin; how rows are split is in `partition.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedglimpse import rng
from fedglimpse.data.config import DataConfig
from fedglimpse.data.custom import own_partition
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.partition import (
    PARTITIONS,
    PartitionFunctions,
    class_pools,
    class_sizes,
    stratified_sample,
)
from fedglimpse.errors import UserError, require

if TYPE_CHECKING:
    from fedglimpse.data.partition import DrawCounts


class Rows(Protocol):
    """Row numbers of every client: a tuple of tensors, or `VirtualRows`."""

    def __len__(self) -> int: ...

    def __getitem__(self, client: int, /) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor]: ...


@dataclass(frozen=True, eq=False)  # compared by identity: tensors have no single ==
class VirtualRows:
    """Row numbers of clients that draw them from a shared pool, like a tuple without memory.

    A million clients cannot each have rows of their own: there are fewer rows than clients, and
    their lists would not fit in memory. Here a client's rows are a function of (seed, client),
    drawn again whenever they are read and never stored, so that cost follows the clients that are
    seen. The rows of one client are distinct; two clients may share some.
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


@dataclass(frozen=True, eq=False)  # compared by identity: tensors have no single ==
class Population:
    """Who holds which training rows; the rows themselves stay in the dataset, once."""

    dataset: Dataset
    rows: Rows  # one for each client: row numbers of dataset.x_train, int64
    proxy: Tensor  # row numbers of dataset.x_train that the server evaluates on

    @property
    def num_clients(self) -> int:
        """N, the number of clients."""
        return len(self.rows)

    @cached_property
    def sizes(self) -> Tensor:
        """Local examples of every client `[N]`, int64."""
        if isinstance(self.rows, VirtualRows):
            return self.rows.sizes
        return torch.tensor([len(rows) for rows in self.rows], dtype=torch.long)

    def take(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of some clients as one table.

        Returns:
            Row numbers, padded with 0 to the largest of these clients `[J, n_max]`, and how many
            of each line are real `[J]`.
        """
        sizes = self.sizes[ids.cpu()]
        if not len(ids):
            return torch.zeros(0, 0, dtype=torch.long), sizes
        rows = [self.rows[client] for client in ids.tolist()]
        return pad_sequence(rows, batch_first=True), sizes

    def label_histogram(self, ids: Tensor) -> Tensor:
        """Return how many rows of each class some clients hold `[J, C]`, int64."""
        if isinstance(self.rows, VirtualRows):  # too many clients to remember all of them
            return self._count_labels(ids)
        return self._histogram_of_all[ids.cpu()]

    @property
    def main_labels(self) -> Tensor:
        """Most frequent label of every client `[N]`, the lowest of equally frequent ones."""
        counts = self.label_histogram(torch.arange(self.num_clients)).numpy()
        return torch.from_numpy(counts.argmax(1))

    @cached_property
    def _histogram_of_all(self) -> Tensor:
        return self._count_labels(torch.arange(self.num_clients))

    def _count_labels(self, ids: Tensor) -> Tensor:
        table, sizes = self.take(ids)  # [J, n]
        num_classes = self.dataset.num_classes
        is_row = torch.arange(table.shape[1]) < sizes[:, None]  # [J, n], false for padding
        first_cells = torch.arange(len(ids)) * num_classes  # [J], of each client in a flat table
        cells = first_cells[:, None] + self._labels[table]  # [J, n]
        counts = cells[is_row].bincount(minlength=len(ids) * num_classes)
        return counts.view(len(ids), num_classes)

    @cached_property
    def _labels(self) -> Tensor:
        return self.dataset.y_train.cpu()


def default_proxy_size(num_rows: int) -> int:
    """Return the paper's 1,000 proxy rows, or a tenth of a small dataset."""
    return min(1000, num_rows // 10)


def split_proxy(labels: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Hold out `size` stratified rows for the server; returns (proxy rows, other rows)."""
    require(
        1 <= size < len(labels),
        f"data.proxy={size} does not fit {len(labels)} training rows: give 1 to "
        f"{len(labels) - 1}, for example {max(1, default_proxy_size(len(labels)))}.",
        key="data.proxy",
    )
    return stratified_sample(labels, size, generator)


def build_population(dataset: Dataset, settings: DataConfig, seed: int) -> Population:
    """Hold out the proxy rows, then split the other training rows over the clients.

    The proxy never comes from the test set, and is held out before the split, as the paper
    describes it. With `proxy_source="leaky_train"` it is drawn with replacement from all training
    rows, which the clients keep: what the authors' release does. Proxy and split draw from their
    own random streams.
    """
    functions = partition_functions(settings.partition)
    labels = dataset.y_train.cpu()
    proxy, pool = _proxy_and_pool(labels, settings, rng.generator(seed, "proxy"))
    if settings.samples:
        return Population(dataset, virtual_rows(labels, pool, functions, settings, seed), proxy)
    groups = _subjects(dataset, settings) if settings.by_subject else labels
    generator = rng.generator(seed, "partition")
    clients = functions.split(groups[pool], settings.clients, generator, settings)
    return Population(dataset, tuple(pool[rows] for rows in clients), proxy)


def virtual_rows(
    labels: Tensor, pool: Tensor, functions: PartitionFunctions, settings: DataConfig, seed: int
) -> VirtualRows:
    """Let every client draw `data.samples` rows with its own mix of classes.

    Args:
        labels: of all training rows.  # [n]
        pool: the rows that may be drawn.  # [p]
        functions: of the partition, which say how a client's mix is drawn.
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
    if functions.mix is None:
        drawable = [name for name, registered in PARTITIONS.items() if registered.mix]
        raise UserError(
            f"data.partition={settings.partition} deals rows out, so clients cannot draw "
            f"data.samples={samples} of their own: use {', '.join(drawable)}, or data.samples=0.",
            key="data.partition",
        )
    by_class = class_pools(labels[pool], rng.generator(seed, "partition"))
    draw_counts = functions.mix(class_sizes(by_class), settings)
    pools = tuple(pool[rows] for rows in by_class)
    return VirtualRows(settings.clients, samples, pools, draw_counts, seed)


def partition_functions(name: str) -> PartitionFunctions:
    """Return the partition that `data.partition` names, ours or "package.module:function"."""
    return PARTITIONS[name] if name in PARTITIONS else own_partition(name)


def _proxy_and_pool(
    labels: Tensor, settings: DataConfig, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the server's rows and those that the clients may hold."""
    size = settings.proxy if settings.proxy >= 0 else default_proxy_size(len(labels))
    if settings.proxy_source == "heldout":
        return split_proxy(labels, size, generator)
    require(size > 0, f"data.proxy={size} is empty: give at least 1.", key="data.proxy")
    return torch.randint(len(labels), (size,), generator=generator), torch.arange(len(labels))


def _subjects(dataset: Dataset, settings: DataConfig) -> Tensor:
    if dataset.subjects is None:
        raise UserError(
            f"data.partition={settings.partition} needs to know who made each row, which the "
            f"dataset '{dataset.name}' does not say: use data.name=har or hapt, give `subjects` "
            "with your own data, or use another partition.",
            key="data.partition",
        )
    return dataset.subjects.cpu()
