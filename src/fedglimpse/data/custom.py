"""A user's own dataset, "pkg.mod:factory": called, checked and named after what was written."""

from __future__ import annotations

import operator
import zlib
from dataclasses import replace

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data.dataset import Dataset
from fedglimpse.errors import UserError
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
    whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    if values.dim() != 1 or not whole:
        raise UserError(
            f"{asked} has {name} of {_kind(values)} and shape {tuple(values.shape)}: give one "
            "whole number for each row, such as a tensor of int64."
        )


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
