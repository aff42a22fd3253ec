"""A user's own dataset or partition, "package.module:name": called, and checked once here."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data.config import DataConfig
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.partition import PartitionKind
from fedglimpse.errors import UserError, require
from fedglimpse.plugins import load_callable

_known: dict[str, int] = {}  # name -> checksum of what its factory returned first


def is_own(name: str) -> bool:
    """True for a name that leads to a user's own code."""
    return ":" in name


def checksum_of(name: str) -> int | None:
    """Return the checksum of a user's own data, once they are loaded."""
    return _known.get(name)


def load_own(name: str) -> Dataset:
    """Call the user's factory, which takes no arguments, and check the `Dataset` it returns.

    What it draws from torch's global generator is the same at every call.

    Raises:
        UserError: where it cannot be found or called, or its data cannot be trained on.
    """
    asked = f"data.name={name}"
    with rng.isolated(0, "own code"):  # a module may draw when it is imported, which is once
        factory = load_callable(name, "data.name")
    with rng.isolated(0, "own data"):
        made = factory()
    if not isinstance(made, Dataset):
        raise UserError(
            f"{asked} returned {type(made).__name__}, not a Dataset: return fedglimpse.data.Dataset"
            "(...)."
        )
    _check_shapes(asked, made)
    classes = _classes(asked, made.num_classes)
    for part, y in (("y_train", made.y_train), ("y_test", made.y_test)):
        _check_labels(asked, part, y, classes)
    if made.subjects is not None:
        _check_whole(asked, "subjects", made.subjects)
    found = _plain(replace(made, name=name, num_classes=classes))
    for part, x in (("x_train", found.x_train), ("x_test", found.x_test)):
        _check_finite(asked, part, x)
    _check_same(asked, found)
    return found


def _classes(asked: str, value: object) -> int:
    try:
        classes = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        classes = 0
    if classes < 2:
        raise UserError(
            f"{asked} has num_classes={value!r}: give a whole number of 2 or more, one above the "
            "largest label."
        )
    return classes


def _check_shapes(asked: str, data: Dataset) -> None:
    for name, x in (("x_train", data.x_train), ("x_test", data.x_test)):
        if x.dtype != torch.uint8 and not x.is_floating_point():
            raise UserError(
                f"{asked} has {name} of {_kind(x)}: give uint8 (0 to 255 becomes 0 to 1) or "
                "floats, such as x.float()."
            )
        if x.dim() < 2 or not x.numel():
            raise UserError(
                f"{asked} has {name} of shape {tuple(x.shape)}: give [rows, features] or "
                "[rows, channels, height, width], with nothing empty."
            )
    if data.x_train.shape[1:] != data.x_test.shape[1:]:
        raise UserError(
            f"{asked} has examples of shape {tuple(data.x_train.shape[1:])} in x_train but "
            f"{tuple(data.x_test.shape[1:])} in x_test: give both the same shape."
        )
    if (data.x_train.dtype == torch.uint8) != (data.x_test.dtype == torch.uint8):
        raise UserError(
            f"{asked} has x_train of {_kind(data.x_train)} but x_test of {_kind(data.x_test)}: "
            "give both the same, as only uint8 is divided by 255."
        )


def _check_finite(asked: str, name: str, x: Tensor) -> None:
    bad = x.reshape(len(x), -1).isfinite().logical_not().any(1).nonzero().flatten()
    if len(bad):
        raise UserError(
            f"{asked} has numbers that are not finite in {len(bad)} rows of {name}, first in row "
            f"{int(bad[0])}: leave these rows out or fill them in."
        )


def _check_labels(asked: str, name: str, y: Tensor, classes: int) -> None:
    _check_whole(asked, name, y)
    least, most = int(y.min()), int(y.max())
    if least < 0 or most >= classes:
        raise UserError(
            f"{asked} has the label {least if least < 0 else most} in {name}, but num_classes="
            f"{classes} allows 0 to {classes - 1}: number the classes from 0, or mend num_classes."
        )


def _check_whole(asked: str, name: str, values: Tensor) -> None:
    if values.dim() != 1 or not _is_whole(values):
        raise UserError(
            f"{asked} has {name} of {_kind(values)} and shape {tuple(values.shape)}: give one "
            "whole number for each row, such as a tensor of int64."
        )


def _is_whole(values: Tensor) -> bool:
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _plain(data: Dataset) -> Dataset:
    """Return float32 and int64 in main memory, as the rest of the package has it."""

    def numbers(x: Tensor) -> Tensor:
        return x.detach() if x.dtype == torch.uint8 else x.detach().float()

    plain = replace(
        data,
        x_train=numbers(data.x_train),
        x_test=numbers(data.x_test),
        y_train=data.y_train.long(),
        y_test=data.y_test.long(),
        subjects=None if data.subjects is None else data.subjects.long(),
    )
    return plain.to("cpu")


def _check_same(asked: str, data: Dataset) -> None:
    """Raise UserError where a second call gave other data: runs could not be compared."""
    total = 0
    for part in (data.x_train, data.y_train, data.x_test, data.y_test):
        total = zlib.crc32(part.contiguous().numpy().data, total)
    if _known.setdefault(data.name, total) != total:
        raise UserError(
            f"{asked} returned other data than before: let it return the same at every call, such "
            "as with np.random.default_rng(0) for what it draws."
        )


def _kind(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def own_partition(name: str) -> PartitionKind:
    """Return the partition of a user's function; see docs/data.md for what it takes and returns."""
    with rng.isolated(0, "own code"):
        function = load_callable(name, "data.partition")
    return PartitionKind(partial(_split_by, name, function), meaning=name)


def _split_by(
    name: str,
    function: Callable[..., Any],
    labels: Tensor,
    num_clients: int,
    generator: torch.Generator,
    settings: DataConfig,
) -> list[Tensor]:
    """Call a user's function and return the rows of every client, or raise UserError."""
    start = generator.get_state()
    splits: list[list[Tensor]] = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            generator.set_state(start)
            result = function(labels.clone(), num_clients, generator, settings)
            splits.append(_clients_of(f"data.partition={name}", result))
    first, second = splits
    _check_split(f"data.partition={name}", first, num_clients, len(labels))
    same = len(first) == len(second) and all(map(torch.equal, first, second))
    require(
        same,
        f"data.partition={name} returned other rows when it was called again with the same "
        "arguments: draw random numbers from the generator it is given, and from nothing else.",
        key="data.partition",
    )
    return [rows.long() for rows in first]


def _clients_of(asked: str, result: Any) -> list[Tensor]:
    """Return a tensor for every client of what a user's function returned."""
    try:
        return [torch.as_tensor(rows) for rows in result]
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{asked} returned {type(result).__name__}, not a list of row numbers for each client: "
            "return one list, array or tensor of whole numbers for each client.",
            key="data.partition",
        ) from None


def _check_split(asked: str, clients: list[Tensor], num_clients: int, num_rows: int) -> None:
    """Raise UserError for rows that do not exist, or that two clients hold."""
    require(
        len(clients) == num_clients,
        f"{asked} returned rows for {len(clients)} clients, but there are {num_clients}: return "
        "one list of row numbers for each client.",
        key="data.partition",
    )
    holder = torch.full((num_rows,), -1)
    for client, rows in enumerate(clients):
        of_client = f"{asked} gave client {client}"
        require(
            rows.numel() > 0,
            f"{of_client} no rows: give every client at least one.",
            key="data.partition",
        )
        require(
            rows.dim() == 1 and _is_whole(rows),
            f"{of_client} rows of {_kind(rows)} and shape {tuple(rows.shape)}: give whole numbers, "
            "such as a tensor of int64.",
            key="data.partition",
        )
        rows = rows.long()
        outside = rows[(rows < 0) | (rows >= num_rows)]
        require(
            not len(outside),
            f"{of_client} the row {outside[:1].tolist()}, but rows are numbered 0 to "
            f"{num_rows - 1}, in the order of the labels it is given.",
            key="data.partition",
        )
        _check_given_once(of_client, rows, holder)
        holder[rows] = client


def _check_given_once(of_client: str, rows: Tensor, holder: Tensor) -> None:
    """Raise UserError for a row that is here twice, or that `holder` says another client has."""
    held = rows[holder[rows] >= 0]
    if len(held):
        row = int(held[0])
        raise UserError(
            f"{of_client} the row {row}, which client {int(holder[row])} has too: give every row "
            "to one client at most.",
            key="data.partition",
        )
    values, counts = rows.unique(return_counts=True)
    repeated = values[counts > 1]
    require(
        not len(repeated),
        f"{of_client} the row {repeated[:1].tolist()} more than once: give every row once.",
        key="data.partition",
    )
