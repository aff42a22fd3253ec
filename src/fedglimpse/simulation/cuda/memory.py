"""How many clients fit on a GPU at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from fedglimpse.federation.state import Layout

T = TypeVar("T")

_SHARE = 0.7  # of the free memory that a captured step may take
_PASSES = 5  # activations of all layers, their gradients and what the compiler keeps between
_STATES = 10  # parameters, gradients, optimizer memories, start and end states


def bytes_per_job(model: nn.Module, example: Tensor, batch_size: int, float_bytes: int) -> int:
    """Estimate the memory that one client takes while it trains.

    Args:
        model: the client model, wherever it is.
        example: one input, on the model's device.  # [1, *shape]
        batch_size: of local training.
        float_bytes: bytes of an activation.
    """
    outputs = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal outputs
        outputs += output.numel()

    hooks = []
    for module in model.modules():
        if not list(module.children()):
            hooks.append(module.register_forward_hook(count))
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(example)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return _PASSES * batch_size * outputs * float_bytes // 2 + _STATES * 4 * Layout.of(model).size


def fitting_jobs(job_bytes: int, device: torch.device, largest: int) -> int:
    """Return how many clients fit into the memory that is free, 1 to `largest`."""
    free, total = torch.cuda.mem_get_info(device)
    limit = total * torch.cuda.get_per_process_memory_fraction(device)
    reserved = torch.cuda.memory_reserved(device)
    unused = reserved - torch.cuda.memory_allocated(device)
    available = min(free, limit - reserved) + unused
    return max(min(int(available * _SHARE / job_bytes), largest), 1)


def smaller_until_it_fits(
    attempt: Callable[[int], T], size: int, release: Callable[[], None] = lambda: None
) -> T:
    """Return `attempt(size)`, with half the size for as long as memory runs out.

    Args:
        attempt: called with a size; may raise torch.cuda.OutOfMemoryError for sizes above 1.
        size: of the first attempt.
        release: frees what a failed attempt may have left behind.
    """
    while True:
        try:
            return attempt(size)
        except torch.cuda.OutOfMemoryError:
            if size <= 1:
                raise
        release()
        torch.cuda.empty_cache()
        size //= 2
