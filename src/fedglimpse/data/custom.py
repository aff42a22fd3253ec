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
from fedglimpse.data.partition import PartitionFunctions
from fedglimpse.errors import UserError, require
from fedglimpse.plugins import has_values, load_callable

_checksums: dict[str, int] = {}  # name -> checksum of what its factory returned first


def is_own(name: str) -> bool:
    """True for a name that leads to a user's own code."""
    return ":" in name


def checksum_of(name: str) -> int | None:
    """Return the checksum of a user's own data, once they are loaded."""
    return _checksums.get(name)


def note_checksum(name: str, checksum: int) -> None:
    """Take over the checksum of own data that another process has loaded."""
    _checksums[name] = checksum


def load_own(name: str) -> Dataset:
    """Call the user's factory, which takes no arguments, and check the `Dataset` it returns.

    Its draws from torch's global generator are the same at every call.

    Raises:
        UserError: where it cannot be found or called, or its data cannot be trained on.
    """
    setting = f"data.name={name}"
    with rng.isolated(0, "own code"):  # a module may draw when it is imported, which is once
        factory = load_callable(name, "data.name")
    with rng.isolated(0, "own data"):
        result = factory()
    if not isinstance(result, Dataset):
        raise UserError(
            f"{setting} returned {type(result).__name__}, not a Dataset: return "
            "fedglimpse.data.Dataset(...).",
            key="data.name",
        )
    for field in ("x_train", "y_train", "x_test", "y_test", "subjects"):
        _check_values(setting, field, getattr(result, field))
    _check_examples(setting, "x_train", result.x_train)
    _check_examples(setting, "x_test", result.x_test)
    _check_same_kind(setting, result.x_train, result.x_test)
    num_classes = _num_classes(setting, result.num_classes)
    _check_labels(setting, "y_train", result.y_train, num_classes)
    _check_labels(setting, "y_test", result.y_test, num_classes)
    if result.subjects is not None:
        _check_whole(setting, "subjects", result.subjects)
    dataset = _plain(replace(result, name=name, num_classes=num_classes))
    _check_finite(setting, "x_train", dataset.x_train)
    _check_finite(setting, "x_test", dataset.x_test)
    _check_repeatable(setting, dataset)
    return dataset


def _num_classes(setting: str, value: object) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = 0
    require(
        number >= 2,
        f"{setting} has num_classes={value!r}: give a whole number of 2 or more, one above the "
        "largest label.",
        key="data.name",
    )
    return number


def _check_values(setting: str, name: str, values: object) -> None:
    is_plain = not isinstance(values, Tensor) or has_values(values)
    require(
        is_plain,
        f"{setting} has {name} that is sparse or on the device 'meta': give an ordinary tensor, "
        "such as x.to_dense().",
        key="data.name",
    )


def _check_examples(setting: str, name: str, x: Tensor) -> None:
    require(
        x.dtype == torch.uint8 or x.is_floating_point(),
        f"{setting} has {name} of {_kind(x)}: give uint8 (0 to 255 becomes 0 to 1) or floats, such "
        "as x.float().",
        key="data.name",
    )
    require(
        x.dim() >= 2 and x.numel() > 0,
        f"{setting} has {name} of shape {tuple(x.shape)}: give [rows, features] or "
        "[rows, channels, height, width], with nothing empty.",
        key="data.name",
    )


def _check_same_kind(setting: str, x_train: Tensor, x_test: Tensor) -> None:
    shape = tuple(x_train.shape[1:])
    test_shape = tuple(x_test.shape[1:])
    require(
        shape == test_shape,
        f"{setting} has examples of shape {shape} in x_train but {test_shape} in x_test: give both "
        "the same shape.",
        key="data.name",
    )
    require(
        (x_train.dtype == torch.uint8) == (x_test.dtype == torch.uint8),
        f"{setting} has x_train of {_kind(x_train)} but x_test of {_kind(x_test)}: give both the "
        "same, as only uint8 is divided by 255.",
        key="data.name",
    )


def _check_finite(setting: str, name: str, x: Tensor) -> None:
    row_is_finite = x.reshape(len(x), -1).isfinite().all(1)
    bad_rows = row_is_finite.logical_not().nonzero().flatten().tolist()
    require(
        not bad_rows,
        f"{setting} has numbers that are not finite in {len(bad_rows)} rows of {name}, first in "
        f"row {bad_rows[0] if bad_rows else 0}: leave these rows out or fill them in.",
        key="data.name",
    )


def _check_labels(setting: str, name: str, labels: Tensor, num_classes: int) -> None:
    _check_whole(setting, name, labels)
    smallest = int(labels.min())
    largest = int(labels.max())
    require(
        smallest >= 0 and largest < num_classes,
        f"{setting} has the label {smallest if smallest < 0 else largest} in {name}, but "
        f"num_classes={num_classes} allows 0 to {num_classes - 1}: number the classes from 0, or "
        "correct num_classes.",
        key="data.name",
    )


def _check_whole(setting: str, name: str, values: Tensor) -> None:
    require(
        values.dim() == 1 and _is_whole(values),
        f"{setting} has {name} of {_kind(values)} and shape {tuple(values.shape)}: give one whole "
        "number for each row, such as a tensor of int64.",
        key="data.name",
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


def _check_repeatable(setting: str, data: Dataset) -> None:
    """Raise UserError where a second call gave other data: runs could not be compared."""
    checksum = 0
    for tensor in (data.x_train, data.y_train, data.x_test, data.y_test):
        checksum = zlib.crc32(tensor.contiguous().numpy().data, checksum)
    first_checksum = _checksums.setdefault(data.name, checksum)
    require(
        checksum == first_checksum,
        f"{setting} returned other data than before: return the same data at every call, such as "
        "with np.random.default_rng(0) for random numbers.",
        key="data.name",
    )


def _kind(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def own_partition(name: str) -> PartitionFunctions:
    """Return the partition of a user's function; see docs/data.md for what it takes and returns."""
    with rng.isolated(0, "own code"):
        function = load_callable(name, "data.partition")
    return PartitionFunctions(partial(_split_by, name, function))


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


def _clients_of(setting: str, result: Any) -> list[Tensor]:
    """Return a tensor for every client of what a user's function returned."""
    try:
        clients = [torch.as_tensor(rows) for rows in result]
        if not all(map(has_values, clients)):
            raise TypeError
        return clients
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"{setting} returned {type(result).__name__}, not the row numbers of each client: "
            "return one list, array or tensor of whole numbers for each client.",
            key="data.partition",
        ) from None


def _check_split(setting: str, clients: list[Tensor], num_clients: int, num_rows: int) -> None:
    """Raise UserError for rows that do not exist, or that two clients hold."""
    require(
        len(clients) == num_clients,
        f"{setting} returned rows for {len(clients)} clients, but there are {num_clients}: return "
        "one list of row numbers for each client.",
        key="data.partition",
    )
    holder = torch.full((num_rows,), -1)
    for client, rows in enumerate(clients):
        of_client = f"{setting} gave client {client}"
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
        if len(outside):
            raise UserError(
                f"{of_client} the row {int(outside[0])}, but rows are numbered 0 to "
                f"{num_rows - 1}, in the order of the labels it is given.",
                key="data.partition",
            )
        _check_given_once(of_client, rows, holder)
        holder[rows] = client


def _check_given_once(of_client: str, rows: Tensor, holder: Tensor) -> None:
    """Raise UserError for a row given twice, to this client or to the one in `holder`."""
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
    if len(repeated):
        raise UserError(
            f"{of_client} the row {int(repeated[0])} more than once: give every row once.",
            key="data.partition",
        )
