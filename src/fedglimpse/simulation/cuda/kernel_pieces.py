"""What several Triton kernels have in common."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rectified(z, bias, keep):
    """Return ReLU(z + bias) in float32, 0 where it does not count."""
    return tl.where(keep, tl.maximum(z.to(tl.float32) + bias, 0.0), 0.0)


@triton.jit
def clear(place, keep, BM: tl.constexpr, BN: tl.constexpr):
    """Write zeros to a tile."""
    tl.store(place, tl.zeros((BM, BN), dtype=place.dtype.element_ty), mask=keep)


@triton.jit
def clear_sums(place, away: tl.constexpr, C: tl.constexpr):
    """Write zeros in the place of two sums `[C]`, the second so far behind the first."""
    tl.store(place, tl.zeros((C,), dtype=tl.float32))
    tl.store(place + away, tl.zeros((C,), dtype=tl.float32))


@triton.jit
def sum_parts(sums, C: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr):
    """Return the two sums that a kernel left in parts `[PARTS, 2, C]`; P of them at a time."""
    first = tl.zeros((P, C), dtype=tl.float32)
    second = tl.zeros((P, C), dtype=tl.float32)
    for start in range(0, PARTS, P):
        part = start + tl.arange(0, P)[:, None]
        place = part * 2 * C + tl.arange(0, C)[None, :]
        first += tl.load(sums + place, mask=part < PARTS, other=0.0)
        second += tl.load(sums + C + place, mask=part < PARTS, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def largest(z0, z1, z2, z3):
    """Return the largest of the four."""
    return tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3))


@triton.jit
def shares(best, z0, z1, z2, dy):
    """Give dy to the first of four that is the best one; the fourth where the others are not."""
    d0 = tl.where(z0 == best, dy, 0.0)
    dy = tl.where(z0 == best, 0.0, dy)
    d1 = tl.where(z1 == best, dy, 0.0)
    dy = tl.where(z1 == best, 0.0, dy)
    d2 = tl.where(z2 == best, dy, 0.0)
    return d0, d1, d2, tl.where(z2 == best, 0.0, dy)
