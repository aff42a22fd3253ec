"""A dataset spread over clients, with the proxy rows that the server keeps for itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedglimpse import rng
from fedglimpse.data.config import DataConfig
from fedglimpse.data.custom import own_partition
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.partition import (
    PARTITIONS,
    PartitionKind,
    stratified_sample,
)
from fedglimpse.data.virtual import VirtualRows, virtual_rows
from fedglimpse.errors import UserError, require


class Rows(Protocol):
    """Row numbers of every client: a tuple of tensors, or `VirtualRows`."""

    def __len__(self) -> int: ...

    def __getitem__(self, client: int, /) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor]: ...


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
        rows = [self.rows[client] for client in ids.tolist()]
        empty = torch.zeros(0, 0, dtype=torch.long)
        return pad_sequence(rows, batch_first=True) if rows else empty, self.sizes[ids.cpu()]

    def label_histogram(self, ids: Tensor) -> Tensor:
        """Return how many rows of each class some clients hold `[J, C]`, int64."""
        if not isinstance(self.rows, VirtualRows):
            return self._held[ids.cpu()]
        return self._counted(ids)

    @cached_property
    def _held(self) -> Tensor:
        return self._counted(torch.arange(self.num_clients))

    def _counted(self, ids: Tensor) -> Tensor:
        table, sizes = self.take(ids)  # [J, n]
        classes = self.dataset.num_classes
        real = torch.arange(table.shape[1]) < sizes[:, None]
        cells = torch.arange(len(table))[:, None] * classes + self._labels[table]
        return cells[real].bincount(minlength=len(table) * classes).view(len(table), classes)

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
    kind = partition_kind(settings.partition)
    labels = dataset.y_train.cpu()
    proxy, pool = _proxy_and_pool(labels, settings, rng.generator(seed, "proxy"))
    if settings.samples:
        return Population(dataset, virtual_rows(labels, pool, kind, settings, seed), proxy)
    groups = _subjects(dataset, settings) if kind.by_subject else labels
    generator = rng.generator(seed, "partition")
    clients = kind.split(groups[pool], settings.clients, generator, settings)
    return Population(dataset, tuple(pool[rows] for rows in clients), proxy)


def partition_kind(name: str) -> PartitionKind:
    """Return the partition of a word of `data.partition`, ours or "package.module:function"."""
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
