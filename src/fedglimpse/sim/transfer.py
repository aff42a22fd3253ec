"""To the device and back without waiting for the work it has still to do; and work beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return a small tensor of the CPU on `device`; the caller may change its own afterwards."""
    return values.to(device, non_blocking=True)  # CUDA takes a copy of ordinary memory first


def on_its_way(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the CPU; the answer is a function that waits until it is there.

    Work that is given to a GPU after this call is not waited for.
    """
    if values.device.type != "cuda":
        home = values.cpu()
        return lambda: home
    home = torch.empty_like(values, device="cpu", pin_memory=True)
    home.copy_(values, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(values.device))

    def wait() -> Tensor:
        there.synchronize()
        return home

    return wait


def overtaking(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context for work that needs nothing of what the device is told from now on.

    On a GPU it goes into a queue of its own and does not wait for the first one, such as trainings
    of a round. What comes after the context waits for it again.
    """
    if device.type != "cuda":
        return nullcontext
    now = torch.cuda.Event()
    now.record(torch.cuda.current_stream(device))

    @contextmanager
    def ahead() -> Iterator[None]:
        first, own = torch.cuda.current_stream(device), _own_queue(device)
        own.wait_event(now)
        with torch.cuda.stream(own):
            yield
        first.wait_stream(own)

    return ahead


@cache
def _own_queue(device: torch.device) -> torch.cuda.Stream:
    """Return one queue for all: memory that is freed there is used there again."""
    return torch.cuda.Stream(device, priority=-1)  # small kernels go before those of trainings
