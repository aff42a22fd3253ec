"""Datasets in memory that several processes share, each read from its files only once.

The memory is a file that has no name, which its processes map: it is gone when they are, however
they end. It is passed on while a process is started, and only then (as an argument of
`multiprocessing.Process`, or of the initializer of an executor).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any

import torch
from torch import Tensor

from fedglimpse.data.custom import checksum_of, note_checksum
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.sources import keep, load


@dataclass(frozen=True)
class SharedTensor:
    """A tensor in shared memory."""

    memory: Any  # an array of bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> SharedTensor:
        """Copy a tensor to shared memory."""
        size = tensor.numel() * tensor.element_size()
        shared = SharedTensor(RawArray("B", max(size, 1)), tensor.dtype, tuple(tensor.shape))
        shared.tensor().copy_(tensor)
        return shared

    def tensor(self) -> Tensor:
        """Return the tensor; what it holds is shared."""
        size = 1
        for length in self.shape:
            size *= length
        return torch.frombuffer(self.memory, dtype=self.dtype, count=size).view(self.shape)


@dataclass(frozen=True)
class SharedDataset:
    """A dataset in shared memory."""

    name: str
    label: str
    num_classes: int
    tensors: dict[str, SharedTensor]  # by field of `Dataset`
    checksum: int | None  # of a user's own data

    @staticmethod
    def of(dataset: Dataset) -> SharedDataset:
        """Copy a dataset to shared memory."""
        tensors: dict[str, SharedTensor] = {}
        for field in ("x_train", "y_train", "x_test", "y_test", "subjects"):
            tensor = getattr(dataset, field)
            if tensor is not None:
                tensors[field] = SharedTensor.of(tensor)
        checksum = checksum_of(dataset.name)
        return SharedDataset(dataset.name, dataset.label, dataset.num_classes, tensors, checksum)

    def dataset(self) -> Dataset:
        """Return the dataset; its tensors are shared."""
        tensors = {field: shared.tensor() for field, shared in self.tensors.items()}
        return Dataset(self.name, self.label, num_classes=self.num_classes, **tensors)


def share(names: Iterable[str]) -> list[SharedDataset]:
    """Load datasets into shared memory."""
    return [SharedDataset.of(load(name)) for name in names]


def receive(datasets: Iterable[SharedDataset]) -> None:
    """Let this process take datasets from shared memory instead of loading them."""
    for shared in datasets:
        if shared.checksum is not None:
            note_checksum(shared.name, shared.checksum)
        keep(shared.dataset())
