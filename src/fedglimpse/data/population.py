"""A dataset spread over clients, with the proxy rows that the server keeps for itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedglimpse import rng
from fedglimpse.data import partition as cut
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.virtual import VirtualRows, virtual_rows
from fedglimpse.errors import UserError, nearest

PARTITIONS = ("dirichlet", "label_skew", "shards", "iid", "subject")
PROXY_SOURCES = ("heldout", "leaky_train")


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
    if not 1 <= size < len(labels):
        raise UserError(
            f"data.proxy={size} does not fit {len(labels)} training rows; "
            f"give 1..{len(labels) - 1}, for example {max(1, default_proxy_size(len(labels)))}"
        )
    return cut.stratified_sample(labels, size, generator)


def build_population(
    dataset: Dataset,
    *,
    partition: str,
    num_clients: int,
    alpha: float,
    classes_per_client: int,
    equal_size: bool,
    min_size: int,
    proxy_size: int,
    proxy_source: Literal["heldout", "leaky_train"],
    seed: int,
    samples: int = 0,
) -> Population:
    """Hold out the proxy rows, then split the other training rows over the clients.

    The proxy never comes from the test set, and is held out before the split, as the paper
    describes it. With `leaky_train` it is drawn with replacement from all training rows, which
    the clients keep: what the authors' release does.

    Args:
        dataset: the data.
        partition: one of `PARTITIONS`.
        num_clients: N; for "subject" 0 or the number of subjects.
        alpha: concentration of "dirichlet".
        classes_per_client: of "label_skew"; for "shards" the shards of each client.
        equal_size: "dirichlet" gives all clients the same size.
        min_size: of the smallest client, for "dirichlet" without `equal_size`.
        proxy_size: rows that the server keeps.
        proxy_source: "heldout" or "leaky_train".
        seed: the run's seed; proxy and split draw from their own streams.
        samples: rows that every client draws for itself (`virtual.py`); 0: rows are dealt out.
    """
    _check_word("proxy_source", proxy_source, PROXY_SOURCES)
    _check_word("partition", partition, PARTITIONS)
    labels = dataset.y_train.cpu()
    proxy, rest = _proxy_and_rest(labels, proxy_size, proxy_source, rng.generator(seed, "proxy"))
    if samples:
        drawn = virtual_rows(
            labels, rest, partition=partition, num_clients=num_clients, samples=samples,
            alpha=alpha, classes_per_client=classes_per_client, seed=seed,
        )  # fmt: skip
        return Population(dataset, drawn, proxy)
    draw = rng.generator(seed, "partition")
    if partition == "subject":
        parts = _by_subject(dataset, rest, num_clients)
    elif partition == "iid":
        parts = cut.iid(labels[rest], num_clients, draw)
    elif partition == "shards":
        parts = cut.random_shards(labels[rest], num_clients, classes_per_client, draw)
    elif partition == "label_skew":
        parts = cut.label_skew(labels[rest], num_clients, classes_per_client, draw)
    elif equal_size:
        parts = cut.dirichlet_equal(labels[rest], num_clients, alpha, draw)
    else:
        parts = cut.dirichlet_unequal(labels[rest], num_clients, alpha, min_size, draw)
    return Population(dataset, tuple(rest[part] for part in parts), proxy)


def _proxy_and_rest(
    labels: Tensor, size: int, source: str, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the server's rows and those that the clients may hold."""
    if source == "heldout":
        return split_proxy(labels, size, generator)
    if size < 1:
        raise UserError(f"data.proxy={size}; give at least 1")
    return torch.randint(len(labels), (size,), generator=generator), torch.arange(len(labels))


def _by_subject(dataset: Dataset, rest: Tensor, num_clients: int) -> list[Tensor]:
    if dataset.subjects is None:
        raise UserError(
            f"data.partition=subject needs to know who made each row, which '{dataset.name}' does "
            "not tell; use data.name=har or hapt, give `subjects` with your own data, or use "
            "another partition"
        )
    parts = cut.by_subject(dataset.subjects.cpu()[rest])
    if num_clients not in (0, len(parts)):
        raise UserError(
            f"data.clients={num_clients}, but the training rows of '{dataset.name}' come from "
            f"{len(parts)} subjects; give 0 or {len(parts)}"
        )
    return parts


def _check_word(key: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(
            f"data.{key}='{value}' is unknown.{nearest(value, known)} Choose one of "
            f"{', '.join(known)}"
        )
