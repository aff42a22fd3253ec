"""The Triton kernels of `conv.py`, which explains them; `rolling.py` has one more."""

from __future__ import annotations

import triton
import triton.language as tl

from fedglimpse.simulation.cuda.kernel_pieces import clear, clear_sums, rectified


@triton.jit
def _inside(row, column, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """True where a pixel lies in the image; a number below 0 is a large one without a sign."""
    return (row.to(tl.uint32) < HIGH) & (column.to(tl.uint32) < WIDE)


@triton.jit
def forward_kernel(
    x, w, out, pixels, bias, counts, sums,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    COUNTED: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """One tile [BM pixels, BN channels] of one client.

    Where COUNTED, padding becomes zeros and costs no products. Where MOMENTS, also the sums of r
    and r^2, r = ReLU(out + bias), over its real pixels.
    """
    job = tl.program_id(1).to(tl.int64)
    columns: tl.constexpr = CO // BN
    out_wide: tl.constexpr = WIDE + 2 * PAD - 2
    area: tl.constexpr = (HIGH + 2 * PAD - 2) * out_wide
    chunks: tl.constexpr = CI // BK
    part = tl.program_id(0) // columns
    m = part * BM + tl.arange(0, BM)  # pixel of the output
    n = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    real = (tl.load(counts + job) * area).to(tl.int32) if COUNTED else pixels
    sums += (job * (tl.num_programs(0) // columns) + part) * 2 * CO + n
    if part * BM >= real:
        place = job * pixels * CO + m[:, None] * CO + n[None, :]
        clear(out + place, (m < pixels)[:, None], BM, BN)
        if MOMENTS:
            clear_sums(sums, CO, BN)
        return
    row, column = m % area // out_wide - PAD, m % out_wide - PAD
    x += job * (pixels // area) * HIGH * WIDE * CI
    at = ((m // area * HIGH + row) * WIDE + column) * CI  # of the first tap
    w += job * 9 * CO * CI + n[None, :] * CI + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, 9 * chunks):
        tap, first = step // chunks, step % chunks * BK
        down, right = tap // 3, tap % 3
        inside = _inside(row + down, column + right, HIGH, WIDE) & (m < real)
        place = (at + (down * WIDE + right) * CI + first)[:, None] + k[None, :]
        some = tl.load(x + place, mask=inside[:, None], other=0.0)
        weights = tl.load(w + tap * CO * CI + first)
        total = tl.dot(some, weights, total, input_precision=PRECISION)
    place = job * pixels * CO + m[:, None] * CO + n[None, :]
    z = total.to(out.dtype.element_ty)
    tl.store(out + place, z, mask=(m < pixels)[:, None])
    if MOMENTS:
        r = rectified(z, tl.load(bias + job * CO + n)[None, :], (m < real)[:, None])
        tl.store(sums, tl.sum(r, axis=0))
        tl.store(sums + CO, tl.sum(r * r, axis=0))


@triton.jit
def _parts(value, PRECISION: tl.constexpr):
    """Return what is multiplied: the value itself, or two bf16 whose sum it is."""
    if PRECISION == "split":
        first = value.to(tl.bfloat16)
        return first, (value - first.to(tl.float32)).to(tl.bfloat16)
    else:  # noqa: RET505  (one of the two is compiled)
        return value, value


@triton.jit
def _multiply(a, b, total, PRECISION: tl.constexpr):
    """Add the product of two values, given in `_parts`, to a total."""
    if PRECISION == "split":
        total = tl.dot(a[1], b[0], total)
        total = tl.dot(a[0], b[1], total)
        return tl.dot(a[0], b[0], total)
    else:  # noqa: RET505
        return tl.dot(a[0], b[0], total, input_precision=PRECISION)


@triton.jit
def _grad(grad, line, v, there, n, CO: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Load the gradient at columns v of some lines, 0 outside: [BM, BN], in `_parts`."""
    keep = there & (v.to(tl.uint32) < WIDE)
    place = ((line * WIDE + v) * CO)[:, None] + n[None, :]
    return _parts(tl.load(grad + place, mask=keep[:, None], other=0.0), PRECISION)


@triton.jit
def _put(out, t0, t1, t2, r, n, CI: tl.constexpr, CO: tl.constexpr):
    """Write the tiles of the three kernel columns."""
    down = r // CI
    out += (down * 3 * CI + r % CI)[:, None] * CO + n[None, :]
    keep = (down < 3)[:, None]
    tl.store(out, t0, mask=keep)
    tl.store(out + CI * CO, t1, mask=keep)
    tl.store(out + 2 * CI * CO, t2, mask=keep)


@triton.jit
def weight_kernel(
    x, grad, out, counts, lines, STEPS: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Three tiles [BR kernel rows x inputs, BN outputs] of one client, one for each kernel column.

    The sum runs over one part of the client's lines of outputs, at each column of the input: there
    the three kernel columns meet the same input, and three neighbouring gradients. Where COUNTED,
    padding is not read.
    """
    job = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    columns: tl.constexpr = CO // BN
    out_wide: tl.constexpr = WIDE + 2 * PAD - 2
    out_high: tl.constexpr = HIGH + 2 * PAD - 2
    n = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    r = (tl.program_id(0) // columns) * BR + tl.arange(0, BR)
    down = r // CI
    away = (down * WIDE * CI + r % CI)[None, :]
    x += job * (lines // out_high) * HIGH * WIDE * CI
    grad += job * lines * out_wide * CO
    out += (job * tl.num_programs(1) + part) * 9 * CI * CO
    real = (tl.load(counts + job) * out_high).to(tl.int32) if COUNTED else lines
    t0 = tl.zeros((BR, BN), dtype=tl.float32)
    if part * STEPS * BM >= real * WIDE:
        _put(out, t0, t0, t0, r, n, CI, CO)
        return
    t1, t2 = t0, t0
    for step in range(0, STEPS):
        m = (part * STEPS + step) * BM + tl.arange(0, BM)
        line, column = m // WIDE, m % WIDE
        there = line < real
        row = line % out_high - PAD
        g0 = _grad(grad, line, column + PAD, there, n, CO, out_wide, PRECISION)
        g1 = _grad(grad, line, column + PAD - 1, there, n, CO, out_wide, PRECISION)
        g2 = _grad(grad, line, column + PAD - 2, there, n, CO, out_wide, PRECISION)
        inside = ((row[:, None] + down[None, :]).to(tl.uint32) < HIGH) & (down < 3)[None, :]
        at = ((line // out_high * HIGH + row) * WIDE + column) * CI
        some = tl.load(x + at[:, None] + away, mask=inside & there[:, None], other=0.0)
        a = _parts(some, PRECISION)
        a = (tl.trans(a[0]), tl.trans(a[1]))
        t0 = _multiply(a, g0, t0, PRECISION)
        t1 = _multiply(a, g1, t1, PRECISION)
        t2 = _multiply(a, g2, t2, PRECISION)
    _put(out, t0, t1, t2, r, n, CI, CO)
