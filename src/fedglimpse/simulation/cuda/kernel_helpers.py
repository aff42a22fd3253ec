"""Steps that several Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rectified(z, bias, mask):
    """Return ReLU(z + bias) in float32, 0 where the mask is off."""
    return tl.where(mask, tl.maximum(z.to(tl.float32) + bias, 0.0), 0.0)


@triton.jit
def store_zeros(pointers, mask, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write zeros to a tile `[ROWS, COLUMNS]`."""
    zeros = tl.zeros((ROWS, COLUMNS), dtype=pointers.dtype.element_ty)
    tl.store(pointers, zeros, mask=mask)


@triton.jit
def store_zero_sums(pointers, STRIDE: tl.constexpr, CHANNELS: tl.constexpr):
    """Write zeros over two sums `[CHANNELS]` that begin STRIDE numbers apart."""
    tl.store(pointers, tl.zeros((CHANNELS,), dtype=tl.float32))
    tl.store(pointers + STRIDE, tl.zeros((CHANNELS,), dtype=tl.float32))


@triton.jit
def add_partial_sums(
    sums, CHANNELS: tl.constexpr, PARTIALS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add up what the programs of a kernel left of two sums: `[PARTIALS, 2, CHANNELS]`.

    BLOCK of the PARTIALS are loaded at a time; both orders are fixed, so results repeat.
    """
    first = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    second = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    for start in range(0, PARTIALS, BLOCK):
        partial = start + tl.arange(0, BLOCK)[:, None]
        offsets = partial * 2 * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        mask = partial < PARTIALS
        first += tl.load(sums + offsets, mask=mask, other=0.0)
        second += tl.load(sums + CHANNELS + offsets, mask=mask, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def largest_of_four(z0, z1, z2, z3):
    """Return the largest value, element by element."""
    return tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3))


@triton.jit
def gradients_of_max(largest, z0, z1, z2, grad):
    """Give the gradient of max(z0, z1, z2, z3) to the first of the four that is the largest.

    As torch's pooling does where several are equal. The fourth gets what the others did not take.
    """
    grad0 = tl.where(z0 == largest, grad, 0.0)
    grad = tl.where(z0 == largest, 0.0, grad)
    grad1 = tl.where(z1 == largest, grad, 0.0)
    grad = tl.where(z1 == largest, 0.0, grad)
    grad2 = tl.where(z2 == largest, grad, 0.0)
    grad3 = tl.where(z2 == largest, 0.0, grad)
    return grad0, grad1, grad2, grad3
