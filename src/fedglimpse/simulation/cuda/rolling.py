"""3x3 convolutions of narrow layers, line by line: every pixel is read three times, not nine.

A program takes a few images of one client and goes down their lines. Each line of the input is a
part of three lines of the output, the one above, its own and the one below, which wait in
registers: the first is then complete and written. The weights of all nine taps stay in shared
memory meanwhile, so this is for layers whose weights are few. Else see `conv.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedglimpse.simulation.cuda.kernel_pieces import clear, clear_sums, rectified


@triton.jit
def _taps(two, third, u, v, total):
    """Add the products of three neighbouring pixels with their taps.

    The zero makes the compiler wait for them: totals that change places while a product is on its
    way would have it do one after the other.
    """
    total = tl.dot(two, u, total)
    return tl.dot(third, v, total) + 0.0


@triton.jit
def _leave_out(
    out, sums, exists, line_out: tl.constexpr, HIGH: tl.constexpr, CO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Write what padding gives: zeros."""
    for line in range(0, HIGH):
        clear(out + line * line_out, exists, BM, BN)
    if MOMENTS:
        clear_sums(sums, CO, BN)


@triton.jit
def rolling_kernel(
    x, w, out, images, bias, counts, sums,
    HIGH: tl.constexpr, WIDE: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, COUNTED: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """BN channels of BM / WIDE images of one client, padded by one zero; WIDE divides BM.

    COUNTED and MOMENTS are those of `conv_kernels.forward_kernel`.
    """
    job = tl.program_id(1).to(tl.int64)
    columns: tl.constexpr = CO // BN
    tap: tl.constexpr = CO * CI
    line_in: tl.constexpr = WIDE * CI
    line_out: tl.constexpr = WIDE * CO
    m, k, k2 = tl.arange(0, BM), tl.arange(0, CI), tl.arange(0, 2 * CI)
    n = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    part = tl.program_id(0) // columns
    image, column = part * (BM // WIDE) + m // WIDE, m % WIDE
    pixel = ((job * images + image) * HIGH * WIDE + column)[:, None]  # of the first line
    exists = (image < images)[:, None]
    real = tl.load(counts + job).to(tl.int32) if COUNTED else images
    there = (image < real)[:, None]
    inside = there & ((column[:, None] > 0) | (k2[None, :] >= CI))
    two = x + pixel * CI + k2[None, :] - CI  # the pixel to the left and this one
    third = x + pixel * CI + k[None, :] + CI  # the one to the right
    before_last = there & (column < WIDE - 1)[:, None]
    out += pixel * CO + n[None, :]
    sums += (job * (tl.num_programs(0) // columns) + part) * 2 * CO + n
    if part * (BM // WIDE) >= real:
        _leave_out(out, sums, exists, line_out, HIGH, CO, BM, BN, MOMENTS)
        return
    w += job * 9 * tap + n[None, :] * CI
    w2, w1 = w + (k2 // CI * tap + k2 % CI)[:, None], w + 2 * tap + k[:, None]
    u0, u1, u2 = tl.load(w2), tl.load(w2 + 3 * tap), tl.load(w2 + 6 * tap)
    v0, v1, v2 = tl.load(w1), tl.load(w1 + 3 * tap), tl.load(w1 + 6 * tap)
    above = tl.zeros((BM, BN), dtype=tl.float32)
    own = tl.zeros((BM, BN), dtype=tl.float32)
    first = tl.zeros((BM, BN), dtype=tl.float32)
    second = tl.zeros((BM, BN), dtype=tl.float32)
    if MOMENTS:
        b = tl.load(bias + job * CO + n)[None, :]
    for line in range(0, HIGH):
        a = tl.load(two + line * line_in, mask=inside, other=0.0)
        c = tl.load(third + line * line_in, mask=before_last, other=0.0)
        above = _taps(a, c, u2, v2, above)
        own = _taps(a, c, u1, v1, own)
        below = _taps(a, c, u0, v0, tl.zeros((BM, BN), dtype=tl.float32))
        z = above.to(out.dtype.element_ty)
        tl.store(out + (line - 1) * line_out, z, mask=exists & (line > 0))
        if MOMENTS:
            r = rectified(z, b, there & (line > 0))
            first += r
            second += r * r
        above, own = own, below
    z = above.to(out.dtype.element_ty)
    tl.store(out + (HIGH - 1) * line_out, z, mask=exists)
    if MOMENTS:
        r = rectified(z, b, there)
        tl.store(sums, tl.sum(first + r, axis=0))
        tl.store(sums + CO, tl.sum(second + r * r, axis=0))
