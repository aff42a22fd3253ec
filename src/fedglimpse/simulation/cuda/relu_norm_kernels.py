"""The Triton kernels of `relu_norm.py`, which explains them."""

from __future__ import annotations

import triton
import triton.language as tl

from fedglimpse.simulation.cuda.kernel_pieces import clear, clear_sums, largest, shares, sum_parts


@triton.jit
def moments_to_affine_kernel(sums, weight, beta, counts, mean, var, scale, shift, per_image, eps,
                             C: tl.constexpr, PARTS: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Mean and variance of one client, and the scale and shift that they make of the norm."""
    job = tl.program_id(0).to(tl.int64)
    at = job * C + tl.arange(0, C)
    total = tl.maximum(tl.load(counts + job) * per_image, 1).to(tl.float32)
    first, second = sum_parts(sums + job * PARTS * 2 * C, C, PARTS, P)
    mu = first / total
    spread = tl.maximum(second / total - mu * mu, 0.0)
    factor = tl.load(weight + at).to(tl.float32) * tl.rsqrt(spread + eps)
    tl.store(mean + at, mu)
    tl.store(var + at, spread)
    tl.store(scale + at, factor)
    tl.store(shift + at, tl.load(beta + at).to(tl.float32) - mu * factor)


@triton.jit
def _place(m, wide, POOL: tl.constexpr, corner: tl.constexpr):
    """Row of z that output pixel m reads; with pooling, the given corner of its 2x2 square.

    Images are even-sided here, so the input row of output (image, h, w) is image-major too.
    """
    if POOL:
        half = wide // 2
        row = m // half  # image * high/2 + h
        return (2 * row + corner // 2) * wide + 2 * (m % half) + corner % 2
    return m


@triton.jit
def result_kernel(z, bias, scale, shift, counts, out, rows_out, rows_in, per_image, wide,
                  C: tl.constexpr, BM: tl.constexpr, POOL: tl.constexpr):  # fmt: skip
    """Write ReLU(z + bias) * scale + shift, or the largest of each 2x2 square; 0 for padding."""
    job = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, C)
    exists = (m < rows_out)[:, None]
    real = tl.minimum((tl.load(counts + job) * per_image).to(tl.int32), rows_out)
    if tl.program_id(0) * BM >= real:
        clear(out + (job * rows_out + m)[:, None] * C + c[None, :], exists, BM, C)
        return
    keep = (m < real)[:, None]
    b = tl.load(bias + job * C + c).to(tl.float32)[None, :]
    s = tl.load(scale + job * C + c)[None, :]
    t = tl.load(shift + job * C + c)[None, :]
    best = tl.full((BM, C), float("-inf"), dtype=tl.float32)
    for corner in tl.static_range(4 if POOL else 1):
        place = (job * rows_in + _place(m, wide, POOL, corner))[:, None] * C + c[None, :]
        value = tl.load(z + place, mask=keep, other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.maximum(value + b, 0.0) * s + t)
    place = (job * rows_out + m)[:, None] * C + c[None, :]
    tl.store(out + place, tl.where(keep, best, 0.0).to(out.dtype.element_ty), mask=exists)


@triton.jit
def _corner(z, m, wide, c, keep, b, C: tl.constexpr, POOL: tl.constexpr, corner: tl.constexpr):
    """Load ReLU(z + bias) at one corner of the squares of outputs m: [BM, C]."""
    place = _place(m, wide, POOL, corner)[:, None] * C + c[None, :]
    return tl.maximum(tl.load(z + place, mask=keep, other=0.0).to(tl.float32) + b, 0.0)


@triton.jit
def sums_kernel(z, bias, mean, var, weight, grad, counts, out, eps, rows_out, rows_in, per_image,
                wide, STEPS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                POOL: tl.constexpr):  # fmt: skip
    """Sums of dy and dy * x^ (the gradients of beta and weight), by parts."""
    job, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    c = tl.arange(0, C)
    at = job * C + c
    b = tl.load(bias + at).to(tl.float32)[None, :]
    mu = tl.load(mean + at)[None, :]
    sign = tl.where((tl.load(weight + at) < 0.0) & POOL, -1.0, 1.0)[None, :]
    real = tl.minimum((tl.load(counts + job) * per_image).to(tl.int32), rows_out)
    out += (job * tl.num_programs(0) + part) * 2 * C
    if part * STEPS * BM >= real:
        clear_sums(out + c, C, C)
        return
    z += job * rows_in * C
    grad += job * rows_out * C
    first = tl.zeros((BM, C), dtype=tl.float32)
    second = tl.zeros((BM, C), dtype=tl.float32)
    for step in range(0, STEPS):
        m = (part * STEPS + step) * BM + tl.arange(0, BM)
        keep = (m < real)[:, None]
        dy = tl.load(grad + m[:, None] * C + c[None, :], mask=keep, other=0.0).to(tl.float32)
        r = _corner(z, m, wide, c, keep, b, C, POOL, 0) * sign
        if POOL:  # what pooling picked: the largest, or the smallest where the weight is below 0
            r = tl.maximum(r, _corner(z, m, wide, c, keep, b, C, POOL, 1) * sign)
            r = tl.maximum(r, _corner(z, m, wide, c, keep, b, C, POOL, 2) * sign)
            r = tl.maximum(r, _corner(z, m, wide, c, keep, b, C, POOL, 3) * sign)
        first += dy
        second += dy * (r * sign - mu)
    tl.store(out + c, tl.sum(first, axis=0))
    tl.store(out + C + c, tl.sum(second, axis=0) * tl.rsqrt(tl.load(var + at) + eps))


@triton.jit
def _put(out, m, wide, c, keep, real, r, dy, a, level, slope, C: tl.constexpr,
         POOL: tl.constexpr, corner: tl.constexpr):  # fmt: skip
    """Write dz at one corner, and return it: a * (dy - mean of dy - x^ * mean of dy x^).

    x^ is linear in r, so this is a * dy + level + slope * r.
    """
    dz = tl.where(real & (r > 0.0), a * dy + (level + slope * r), 0.0)
    place = _place(m, wide, POOL, corner)[:, None] * C + c[None, :]
    tl.store(out + place, dz.to(out.dtype.element_ty), mask=keep)
    return dz


@triton.jit
def back_kernel(z, bias, mean, var, weight, grad, counts, sums, out, of_bias, eps,
                rows_out, rows_in, per_image, wide, STEPS: tl.constexpr, C: tl.constexpr,
                BM: tl.constexpr, POOL: tl.constexpr, PARTS: tl.constexpr,
                P: tl.constexpr, FROZEN: tl.constexpr):  # fmt: skip
    """dz, and by parts its sum (the gradient of the bias).

    Where FROZEN, mean and variance are constants: dz is dy times the factor.
    """
    job, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    c = tl.arange(0, C)
    at = job * C + c
    b = tl.load(bias + at).to(tl.float32)[None, :]
    count = (tl.load(counts + job) * per_image).to(tl.int32)  # real output pixels
    of_bias += (job * tl.num_programs(0) + part) * C
    if part * STEPS * BM >= count:
        for step in range(0, STEPS):
            m = (part * STEPS + step) * BM + tl.arange(0, BM)
            for corner in tl.static_range(4 if POOL else 1):
                place = (job * rows_in + _place(m, wide, POOL, corner))[:, None] * C + c[None, :]
                clear(out + place, (m < rows_out)[:, None], BM, C)
        tl.store(of_bias + c, tl.zeros((C,), dtype=tl.float32))
        return
    inv = tl.rsqrt(tl.load(var + at) + eps)
    factor = tl.load(weight + at) * inv
    total = tl.maximum(count * (4 if POOL else 1), 1).to(tl.float32)
    sum_dy, sum_dyx = sum_parts(sums + job * PARTS * 2 * C, C, PARTS, P)
    moving = 0.0 if FROZEN else 1.0
    tilt = -moving * factor * inv * sum_dyx / total
    level = -moving * factor * sum_dy / total - tilt * tl.load(mean + at)
    sign = tl.where(factor < 0.0, -1.0, 1.0)[None, :]
    a, level, slope = factor[None, :], level[None, :], tilt[None, :]
    z += job * rows_in * C
    out += job * rows_in * C
    grad += job * rows_out * C
    s = tl.zeros((BM, C), dtype=tl.float32)
    for step in range(0, STEPS):
        m = (part * STEPS + step) * BM + tl.arange(0, BM)
        keep = (m < rows_out)[:, None]
        real = keep & (m < count)[:, None]
        dy = tl.load(grad + m[:, None] * C + c[None, :], mask=real, other=0.0).to(tl.float32)
        r0 = _corner(z, m, wide, c, keep, b, C, POOL, 0)
        if POOL:
            r1 = _corner(z, m, wide, c, keep, b, C, POOL, 1)
            r2 = _corner(z, m, wide, c, keep, b, C, POOL, 2)
            r3 = _corner(z, m, wide, c, keep, b, C, POOL, 3)
            best = largest(r0 * sign, r1 * sign, r2 * sign, r3 * sign) * sign
            d0, d1, d2, d3 = shares(best, r0, r1, r2, dy)
            s += _put(out, m, wide, c, keep, real, r0, d0, a, level, slope, C, POOL, 0)
            s += _put(out, m, wide, c, keep, real, r1, d1, a, level, slope, C, POOL, 1)
            s += _put(out, m, wide, c, keep, real, r2, d2, a, level, slope, C, POOL, 2)
            s += _put(out, m, wide, c, keep, real, r3, d3, a, level, slope, C, POOL, 3)
        else:
            s += _put(out, m, wide, c, keep, real, r0, dy, a, level, slope, C, POOL, 0)
    tl.store(of_bias + c, tl.sum(s, axis=0))
