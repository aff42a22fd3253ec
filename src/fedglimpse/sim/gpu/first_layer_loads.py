"""What the kernels of `first_layer_kernels.py` load: the pixels that a quad sees, and its weights.

Names are explained there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_patches(x, m, quads, per_image, across, CI: tl.constexpr, K: tl.constexpr):
    """Load the 4x4 pixels that every quad sees: [BM, K], k = input * 16 + pixel."""
    wide = 2 * across + 2
    high = 2 * (per_image // across) + 2
    k = tl.arange(0, K)
    away = ((k % 16) // 4 * wide + k % 4) * CI + k // 16
    m = tl.minimum(m, quads - 1)
    row = 2 * (m % per_image // across)
    place = ((m // per_image * high + row) * wide + 2 * (m % across)) * CI
    return tl.load(x + place[:, None] + away[None, :], mask=(k < 16 * CI)[None, :], other=0.0)


@triton.jit
def images(x, job, quads, per_image, across, CI: tl.constexpr):
    """Return where a client's images begin, each with its zeros around it."""
    pixels = (2 * (per_image // across) + 2) * (2 * across + 2)
    return x + job * (quads // per_image) * pixels * CI


@triton.jit
def _taps(weight, sign, kind: tl.constexpr, corner: tl.constexpr, CI: tl.constexpr,
          CO: tl.constexpr, K: tl.constexpr):  # fmt: skip
    """Load the weights of one corner, 9 of each 16 filled: [K, CO]."""
    k = tl.arange(0, K)[:, None]
    row, column = k % 16 // 4 - corner // 2, k % 4 - corner % 2
    filled = (row >= 0) & (row < 3) & (column >= 0) & (column < 3) & (k < 16 * CI)
    place = tl.arange(0, CO)[None, :] * 9 * CI + k // 16 * 9 + row * 3 + column
    return (tl.load(weight + place, mask=filled, other=0.0) * sign).to(kind)


@triton.jit
def all_taps(weight, job, sign, kind: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
              K: tl.constexpr):  # fmt: skip
    """Load the weights of the four corners."""
    weight += job * 9 * CI * CO
    return (
        _taps(weight, sign, kind, 0, CI, CO, K),
        _taps(weight, sign, kind, 1, CI, CO, K),
        _taps(weight, sign, kind, 2, CI, CO, K),
        _taps(weight, sign, kind, 3, CI, CO, K),
    )
