"""To the device and back without waiting for the work it has still to do."""

from __future__ import annotations

from collections.abc import Callable

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
