"""What a server may believe of a client: shapes, sizes and numbers are checked before use."""

from __future__ import annotations

import io
import math

import numpy as np
import torch
from flwr.app import Array, RecordDict
from torch import Tensor

_HEADER = 1024  # bytes that numpy's format may add


class Refused(Exception):
    """A reply that is not used; the text says why, in a few words of our own."""


def tensor_of(array: Array, shape: tuple[int, ...]) -> Tensor:
    """Return a client's array as float32, or raise Refused.

    Numpy's own header is read first: nothing is allocated for a shape that was not asked for.
    """
    floats = math.prod(shape)
    if len(array.data) > 4 * floats + _HEADER:
        raise Refused(f"oversized: {len(array.data)} bytes for {floats} floats")
    try:
        file = io.BytesIO(array.data)
        np.lib.format.read_magic(file)
        found, _, kind = np.lib.format.read_array_header_1_0(file)
    except Exception:
        raise Refused("unreadable array") from None
    if kind != np.float32 or found != shape or len(array.data) - file.tell() != 4 * floats:
        raise Refused(f"wrong shape: {kind}{list(found)} instead of float32{list(shape)}")
    values = np.frombuffer(array.data, np.float32, floats, file.tell()).reshape(shape)
    tensor = torch.from_numpy(values.copy())
    if not tensor.isfinite().all():
        raise Refused("not finite")
    return tensor


def report_of(content: RecordDict, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return one report of a reply, a number or an array, or raise Refused."""
    arrays, metrics = content.array_records.get("arrays"), content.metric_records.get("metrics")
    if arrays is not None and name in arrays:
        return tensor_of(arrays[name], shape)
    if not shape and metrics is not None and isinstance(metrics.get(name), int | float):
        value = torch.tensor(float(metrics[name]), dtype=torch.float32)  # type: ignore[arg-type]
        if not value.isfinite():
            raise Refused("not finite")
        return value
    raise Refused(f"no {name}")


def size_in(content: RecordDict, known: int) -> int:
    """Return the number of local examples in a reply; what was known before, if it says none."""
    metrics = content.metric_records.get("metrics")
    value = None if metrics is None else metrics.get("num-examples")
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 <= value < 2**40:
        return known
    return int(value)
