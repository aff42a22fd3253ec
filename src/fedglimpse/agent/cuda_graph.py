"""A function of tensors, recorded once as a CUDA graph and replayed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")  # a tensor, or several

_WARM_UPS = 2  # runs before the recording: libraries choose their algorithms there


class Graphed(Generic[T]):
    """Replays the newest recording; another key or other shapes make a new one."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        self._shapes: list[Any] = []

    def __call__(
        self,
        function: Callable[..., T],
        inputs: Sequence[Tensor],
        changed: Sequence[Tensor],
        key: tuple[Any, ...],
    ) -> T:
        """Return `function(*inputs)`, in tensors that the next call writes to again.

        Args:
            function: reads its arguments and tensors that stay where they are.
            inputs: its arguments, on the device.
            changed: every tensor that it writes to; they are put back after the warm-up.
            key: objects that the function holds on to.
        """
        shapes = [(tensor.shape, tensor.dtype) for tensor in inputs]
        same_key = len(key) == len(self._key) and all(map(operator.is_, key, self._key))
        if shapes != self._shapes or not same_key:
            self._record(function, inputs, changed)
            self._key = key
            self._shapes = shapes
        for recorded, tensor in zip(self._inputs, inputs, strict=True):
            recorded.copy_(tensor)
        self._graph.replay()
        return self._output

    def _record(
        self,
        function: Callable[..., T],
        inputs: Sequence[Tensor],
        changed: Sequence[Tensor],
    ) -> None:
        before = [tensor.clone() for tensor in changed]
        self._inputs = [tensor.clone() for tensor in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = function(*self._inputs)
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
