"""What the kernels of `first_layer_kernels.py` load: the pixels that a quad sees, and its weights.

Names are explained there.

The Triton kernels of `first_layer.py`, which explains them.

Names that all kernels share: a client's quads are numbered image by image, row by row; `quads` are
all of them, `per_image` those of an image, `across` those of a row. A program takes STEPS tiles of
BM quads. K is the depth of the products: 16 pixels x CI inputs, to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedglimpse.simulation.cuda.kernel_pieces import clear, clear_sums, largest, shares, sum_parts


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


@triton.jit
def _pick(a, b, c, d, corner: tl.constexpr):
    return a if corner == 0 else (b if corner == 1 else (c if corner == 2 else d))


@triton.jit
def _place(m, across, corner: tl.constexpr):
    """Output pixel of a corner of quad m."""
    return (2 * (m // across) + corner // 2) * (2 * across) + 2 * (m % across) + corner % 2


@triton.jit
def moments_kernel(
    x, weight, bias, counts, out, quads, per_image, across,
    STEPS: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sums of r and r^2, r = ReLU(conv(x) + bias), over one part of a client's real pixels."""
    job, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    x = images(x, job, quads, per_image, across, CI)
    c = tl.arange(0, CO)
    real = (tl.load(counts + job) * per_image).to(tl.int32)
    out += (job * tl.num_programs(0) + part) * 2 * CO
    if part * STEPS * BM >= real:
        clear_sums(out + c, CO, CO)
        return
    w0, w1, w2, w3 = all_taps(weight, job, 1.0, x.dtype.element_ty, CI, CO, K)
    b = tl.load(bias + job * CO + c)[None, :]
    first = tl.zeros((BM, CO), dtype=tl.float32)
    second = tl.zeros((BM, CO), dtype=tl.float32)
    for step in range(0, STEPS):
        m = (part * STEPS + step) * BM + tl.arange(0, BM)
        keep = (m < real)[:, None]
        patches = load_patches(x, m, quads, per_image, across, CI, K)
        for corner in tl.static_range(4):
            taps = _pick(w0, w1, w2, w3, corner)
            z = tl.dot(patches, taps, input_precision=PRECISION) + b
            r = tl.where(keep, tl.maximum(z, 0.0), 0.0)
            first += r
            second += r * r
    tl.store(out + c, tl.sum(first, axis=0))
    tl.store(out + CO + c, tl.sum(second, axis=0))


@triton.jit
def _products(patches, w0, w1, w2, w3, PRECISION: tl.constexpr):
    """Convolve the four corners, without bias: [BM, CO] each."""
    return (
        tl.dot(patches, w0, input_precision=PRECISION),
        tl.dot(patches, w1, input_precision=PRECISION),
        tl.dot(patches, w2, input_precision=PRECISION),
        tl.dot(patches, w3, input_precision=PRECISION),
    )


@triton.jit
def _best(patches, w0, w1, w2, w3, sign, b, PRECISION: tl.constexpr):
    """Return the ReLU that pooling picks: the largest, or the smallest where the scale is below 0.

    The weights carry the sign, so that it is the largest of the four products in both cases.
    """
    z0, z1, z2, z3 = _products(patches, w0, w1, w2, w3, PRECISION)
    return tl.maximum(largest(z0, z1, z2, z3) * sign + b, 0.0)


@triton.jit
def result_kernel(
    x, weight, bias, gamma, beta, counts, sums, mean, var, out, eps, quads, per_image, across,
    STEPS: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Write the statistics and y of one part of a client's quads; zeros for padding."""
    job, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    x = images(x, job, quads, per_image, across, CI)
    c = tl.arange(0, CO)
    at = job * CO + c
    real = (tl.load(counts + job) * per_image).to(tl.int32)
    total = tl.maximum(real * 4, 1).to(tl.float32)
    first, second = sum_parts(sums + job * PARTS * 2 * CO, CO, PARTS, PARTS)
    mu = first / total
    spread = tl.maximum(second / total - mu * mu, 0.0)
    tl.store(mean + at, mu, mask=(c >= 0) & (part == 0))
    tl.store(var + at, spread, mask=(c >= 0) & (part == 0))
    out += job * quads * CO * (1 if POOL else 4)
    if part * STEPS * BM >= real:
        for step in range(0, STEPS):
            m = (part * STEPS + step) * BM + tl.arange(0, BM)
            for corner in tl.static_range(1 if POOL else 4):
                place = m if POOL else _place(m, across, corner)
                clear(out + place[:, None] * CO + c[None, :], (m < quads)[:, None], BM, CO)
        return
    scale = tl.load(gamma + at) * tl.rsqrt(spread + eps)
    shift = (tl.load(beta + at) - mu * scale)[None, :]
    sign = tl.where((scale < 0.0) & POOL, -1.0, 1.0)[None, :]
    scale = scale[None, :]
    b = tl.load(bias + at)[None, :]
    w0, w1, w2, w3 = all_taps(weight, job, sign, x.dtype.element_ty, CI, CO, K)
    for step in range(0, STEPS):
        m = (part * STEPS + step) * BM + tl.arange(0, BM)
        keep = (m < quads)[:, None]
        there = (m < real)[:, None]
        patches = load_patches(x, m, quads, per_image, across, CI, K)
        if POOL:
            y = _best(patches, w0, w1, w2, w3, sign, b, PRECISION) * scale + shift
            y = tl.where(there, y, 0.0)
            tl.store(out + m[:, None] * CO + c[None, :], y.to(out.dtype.element_ty), mask=keep)
        else:
            for corner in tl.static_range(4):
                taps = _pick(w0, w1, w2, w3, corner)
                z = tl.dot(patches, taps, input_precision=PRECISION) + b
                y = tl.where(there, tl.maximum(z, 0.0) * scale + shift, 0.0)
                place = _place(m, across, corner)[:, None] * CO + c[None, :]
                tl.store(out + place, y.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _corner_grad(grad, m, c, keep, across, corner: tl.constexpr, CO: tl.constexpr):
    place = _place(m, across, corner)[:, None] * CO + c[None, :]
    return tl.load(grad + place, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def sums_kernel(
    x, weight, bias, gamma, counts, mean, var, grad, out, eps, quads, per_image, across,
    STEPS: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Sums of dy and dy * x^ (the gradients of beta and gamma), by parts."""
    job, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    x = images(x, job, quads, per_image, across, CI)
    c = tl.arange(0, CO)
    at = job * CO + c
    real = (tl.load(counts + job) * per_image).to(tl.int32)
    out += (job * tl.num_programs(0) + part) * 2 * CO
    if part * STEPS * BM >= real:
        clear_sums(out + c, CO, CO)
        return
    mu = tl.load(mean + at)[None, :]
    b = tl.load(bias + at)[None, :]
    sign = tl.where((tl.load(gamma + at) < 0.0) & POOL, -1.0, 1.0)[None, :]
    w0, w1, w2, w3 = all_taps(weight, job, sign, x.dtype.element_ty, CI, CO, K)
    grad += job * quads * CO * (1 if POOL else 4)
    first = tl.zeros((BM, CO), dtype=tl.float32)
    second = tl.zeros((BM, CO), dtype=tl.float32)
    for step in range(0, STEPS):
        m = (part * STEPS + step) * BM + tl.arange(0, BM)
        keep = (m < real)[:, None]
        patches = load_patches(x, m, quads, per_image, across, CI, K)
        if POOL:
            dy = tl.load(grad + m[:, None] * CO + c[None, :], mask=keep, other=0.0).to(tl.float32)
            r = _best(patches, w0, w1, w2, w3, sign, b, PRECISION)
            first += dy
            second += dy * (r - mu)
        else:
            for corner in tl.static_range(4):
                dy = _corner_grad(grad, m, c, keep, across, corner, CO)
                taps = _pick(w0, w1, w2, w3, corner)
                z = tl.dot(patches, taps, input_precision=PRECISION) + b
                first += dy
                second += dy * (tl.maximum(z, 0.0) - mu)
    tl.store(out + c, tl.sum(first, axis=0))
    tl.store(out + CO + c, tl.sum(second, axis=0) * tl.rsqrt(tl.load(var + at) + eps))


@triton.jit
def _add(patches, z, dy, keep, t, of_bias, sign, b, a, level, slope, PRECISION: tl.constexpr):
    """Add a corner's share to the gradients of its weights and of the bias.

    The gradient before the ReLU is a * (dy - mean of dy - x^ * mean of dy x^), where x^ is linear
    in z: a * dy + level + slope * z.
    """
    z = z * sign + b
    dz = tl.where(keep & (z > 0.0), a * dy + (level + slope * z), 0.0)
    t = tl.dot(tl.trans(patches), dz.to(patches.dtype), t, input_precision=PRECISION)
    return t, of_bias + dz


@triton.jit
def _put(out, t0, t1, t2, t3, CI: tl.constexpr, CO: tl.constexpr, K: tl.constexpr):
    """Write the gradients of each corner's weights."""
    k = tl.arange(0, K)[:, None]
    out += k * CO + tl.arange(0, CO)[None, :]
    for corner in tl.static_range(4):
        tl.store(out + corner * 16 * CI * CO, _pick(t0, t1, t2, t3, corner), mask=k < 16 * CI)


@triton.jit
def weights_kernel(
    x, weight, bias, gamma, counts, mean, var, grad, sums, of_bias, of_weight, eps,
    quads, per_image, across,
    STEPS: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr, PARTS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Gradients of the bias and of each corner's weights, by parts."""
    job, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    x = images(x, job, quads, per_image, across, CI)
    c = tl.arange(0, CO)
    at = job * CO + c
    real = (tl.load(counts + job) * per_image).to(tl.int32)
    of_bias += (job * tl.num_programs(0) + part) * CO + c
    of_weight += (job * tl.num_programs(0) + part) * 4 * 16 * CI * CO
    t0 = tl.zeros((K, CO), dtype=tl.float32)
    if part * STEPS * BM >= real:
        tl.store(of_bias, tl.zeros((CO,), dtype=tl.float32))
        _put(of_weight, t0, t0, t0, t0, CI, CO, K)
        return
    b = tl.load(bias + at)[None, :]
    total = tl.maximum(real * 4, 1).to(tl.float32)
    first, second = sum_parts(sums + job * PARTS * 2 * CO, CO, PARTS, PARTS)
    inverse = tl.rsqrt(tl.load(var + at) + eps)
    factor = tl.load(gamma + at) * inverse
    tilt = -factor * inverse * second / total
    level = (-factor * first / total - tilt * tl.load(mean + at))[None, :]
    sign = tl.where((factor < 0.0) & POOL, -1.0, 1.0)[None, :]
    a, slope = factor[None, :], tilt[None, :]
    w0, w1, w2, w3 = all_taps(weight, job, sign, x.dtype.element_ty, CI, CO, K)
    grad += job * quads * CO * (1 if POOL else 4)
    s = tl.zeros((BM, CO), dtype=tl.float32)
    t1, t2, t3 = t0, t0, t0
    for step in range(0, STEPS):
        m = (part * STEPS + step) * BM + tl.arange(0, BM)
        keep = (m < real)[:, None]
        p = load_patches(x, m, quads, per_image, across, CI, K)
        if POOL:
            z0, z1, z2, z3 = _products(p, w0, w1, w2, w3, PRECISION)
            dy = tl.load(grad + m[:, None] * CO + c[None, :], mask=keep, other=0.0)
            d0, d1, d2, d3 = shares(largest(z0, z1, z2, z3), z0, z1, z2, dy.to(tl.float32))
            t0, s = _add(p, z0, d0, keep, t0, s, sign, b, a, level, slope, PRECISION)
            t1, s = _add(p, z1, d1, keep, t1, s, sign, b, a, level, slope, PRECISION)
            t2, s = _add(p, z2, d2, keep, t2, s, sign, b, a, level, slope, PRECISION)
            t3, s = _add(p, z3, d3, keep, t3, s, sign, b, a, level, slope, PRECISION)
        else:
            for corner in tl.static_range(4):
                z = tl.dot(p, _pick(w0, w1, w2, w3, corner), input_precision=PRECISION)
                dy = _corner_grad(grad, m, c, keep, across, corner, CO)
                t = _pick(t0, t1, t2, t3, corner)
                t, s = _add(p, z, dy, keep, t, s, sign, b, a, level, slope, PRECISION)
                t0 = t if corner == 0 else t0
                t1 = t if corner == 1 else t1
                t2 = t if corner == 2 else t2
                t3 = t if corner == 3 else t3
    tl.store(of_bias, tl.sum(s, axis=0))
    _put(of_weight, t0, t1, t2, t3, CI, CO, K)
