"""How many clients and how many examples fit on a GPU at once."""

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

_EXAMPLES = 16_000  # of all states together in a forward pass
_FLAT_EXAMPLES = 128_000  # of inputs that are not images
_SMALL_GPU = 2**35  # bytes of a GPU that takes so many examples; larger ones take more,
_LARGEST_FACTOR = 4  # up to so many times as many
_LARGEST_INDEX = 2**31 // 256  # of one state's pixels in a pass: kernels count 256 channels of them


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


def fitting_examples(x: Tensor, factor: int) -> int:
    """Return how many examples of every state go into one pass.

    Args:
        x: the examples.  # [S, n, *shape]
        factor: divides what fits into a forward pass.
    """
    limit = _FLAT_EXAMPLES if x.dim() == 3 else _EXAMPLES
    memory = torch.cuda.get_device_properties(x.device).total_memory
    usable = memory * torch.cuda.get_per_process_memory_fraction(x.device)
    times_larger = max(int(usable / _SMALL_GPU), 1)
    limit *= min(times_larger, _LARGEST_FACTOR)
    num_states = max(len(x), 1)
    examples = limit // (factor * num_states)
    if x.dim() == 5:  # images [S, n, C, H, W]
        pixels = x.shape[3] * x.shape[4]
        examples = min(examples, _LARGEST_INDEX // pixels)
    return max(examples, 1)


def in_even_pieces(
    largest: int, x: Tensor, y: Tensor, weights: Tensor
) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return a power of two, at most `largest`, and examples that divide into pieces of it.

    A GPU's kernels for gradients are compiled for the size of a piece, which takes seconds: so few
    different sizes, whatever the number of clients and their examples. Padding has weight 0.
    """
    count = x.shape[1]
    power_below_largest = 1 << (largest.bit_length() - 1)
    power_above_count = 1 << (count - 1).bit_length()
    size = min(power_below_largest, power_above_count)
    padding = -count % size
    padded: list[Tensor] = []
    for tensor in (x, y, weights):
        shape = (len(tensor), padding, *tensor.shape[2:])
        zeros = tensor.new_zeros(shape)
        padded.append(torch.cat([tensor, zeros], dim=1))
    return size, padded[0], padded[1], padded[2]


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
