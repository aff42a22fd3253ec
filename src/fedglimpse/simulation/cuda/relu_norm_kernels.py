"""The Triton kernels of `relu_norm.py`, which says what they are for.

A client's images are a matrix here, one row for each pixel and one column for each channel: z has
`pixels_in` rows and y has `pixels_out`, a quarter of them where POOL. Tiles are
`[BLOCK, CHANNELS]`: BLOCK pixels of y with all their channels. A program takes one tile, or STEPS
tiles one after the other where it keeps sums.

In the formulas r is ReLU(z + bias), x^ the normalised r, and dy and dz are gradients. The first
`counts[job]` images of a client are real; the others are padding and cost next to nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedglimpse.simulation.cuda.kernel_helpers import (
    add_partial_sums,
    gradients_of_max,
    largest_of_four,
    store_zero_sums,
    store_zeros,
)


@triton.jit
def statistics_kernel(
    sums, weight, beta, counts, mean, var, scale, shift, per_image, eps,
    CHANNELS: tl.constexpr, PARTIALS: tl.constexpr, PARTIALS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and variance of one client, and the norm as one product and one sum: scale, shift."""
    job = tl.program_id(0).to(tl.int64)
    columns = job * CHANNELS + tl.arange(0, CHANNELS)
    num_values = tl.maximum(tl.load(counts + job) * per_image, 1).to(tl.float32)
    job_sums = sums + job * PARTIALS * 2 * CHANNELS
    sum_r, sum_r2 = add_partial_sums(job_sums, CHANNELS, PARTIALS, PARTIALS_BLOCK)
    mean_r = sum_r / num_values
    var_r = tl.maximum(sum_r2 / num_values - mean_r * mean_r, 0.0)
    scale_r = tl.load(weight + columns).to(tl.float32) * tl.rsqrt(var_r + eps)
    tl.store(mean + columns, mean_r)
    tl.store(var + columns, var_r)
    tl.store(scale + columns, scale_r)
    tl.store(shift + columns, tl.load(beta + columns).to(tl.float32) - mean_r * scale_r)


@triton.jit
def _input_pixel(pixel, width, POOL: tl.constexpr, corner: tl.constexpr):
    """Return the pixel of z behind an output pixel; with pooling, one corner of its 2x2 square.

    Rows are counted over all images: images are even-sided where they are pooled, so row h of the
    output covers rows 2h and 2h + 1 of the input in this count, too.
    """
    if POOL:
        half_width = width // 2
        row = pixel // half_width
        return (2 * row + corner // 2) * width + 2 * (pixel % half_width) + corner % 2
    return pixel


@triton.jit
def result_kernel(
    z, bias, scale, shift, counts, y, pixels_out, pixels_in, per_image, width,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Write ReLU(z + bias) * scale + shift, or the largest of each 2x2 square; 0 for padding."""
    job = tl.program_id(1).to(tl.int64)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    exists = (pixel < pixels_out)[:, None]
    num_real = tl.minimum((tl.load(counts + job) * per_image).to(tl.int32), pixels_out)
    if tl.program_id(0) * BLOCK >= num_real:  # nothing but padding
        offsets = (job * pixels_out + pixel)[:, None] * CHANNELS + channel[None, :]
        store_zeros(y + offsets, exists, BLOCK, CHANNELS)
        return
    is_real = (pixel < num_real)[:, None]
    job_bias = tl.load(bias + job * CHANNELS + channel).to(tl.float32)[None, :]
    job_scale = tl.load(scale + job * CHANNELS + channel)[None, :]
    job_shift = tl.load(shift + job * CHANNELS + channel)[None, :]
    largest = tl.full((BLOCK, CHANNELS), float("-inf"), dtype=tl.float32)
    for corner in tl.static_range(4 if POOL else 1):
        row = job * pixels_in + _input_pixel(pixel, width, POOL, corner)
        offsets = row[:, None] * CHANNELS + channel[None, :]
        value = tl.load(z + offsets, mask=is_real, other=0.0).to(tl.float32)
        normed = tl.maximum(value + job_bias, 0.0) * job_scale + job_shift
        largest = tl.maximum(largest, normed)
    offsets = (job * pixels_out + pixel)[:, None] * CHANNELS + channel[None, :]
    tl.store(y + offsets, tl.where(is_real, largest, 0.0).to(y.dtype.element_ty), mask=exists)


@triton.jit
def _load_rectified(
    z, pixel, width, channel, mask, bias,
    CHANNELS: tl.constexpr, POOL: tl.constexpr, corner: tl.constexpr,
):  # fmt: skip
    """Load r at one corner of the squares of these output pixels: `[BLOCK, CHANNELS]`."""
    offsets = _input_pixel(pixel, width, POOL, corner)[:, None] * CHANNELS + channel[None, :]
    return tl.maximum(tl.load(z + offsets, mask=mask, other=0.0).to(tl.float32) + bias, 0.0)


@triton.jit
def gradient_sums_kernel(
    z, bias, mean, var, weight, grad, counts, sums, eps, pixels_out, pixels_in, per_image, width,
    STEPS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Partial sums of dy and dy * x^, which are the gradients of beta and weight."""
    job = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    channel = tl.arange(0, CHANNELS)
    columns = job * CHANNELS + channel
    job_bias = tl.load(bias + columns).to(tl.float32)[None, :]
    job_mean = tl.load(mean + columns)[None, :]
    # Pooling takes the largest y: the largest r, or the smallest where the norm's weight is below
    # 0. With this sign it is the largest r * sign in both cases.
    sign = tl.where((tl.load(weight + columns) < 0.0) & POOL, -1.0, 1.0)[None, :]
    num_real = tl.minimum((tl.load(counts + job) * per_image).to(tl.int32), pixels_out)
    sums += (job * tl.num_programs(0) + program) * 2 * CHANNELS
    if program * STEPS * BLOCK >= num_real:  # nothing but padding
        store_zero_sums(sums + channel, CHANNELS, CHANNELS)
        return
    z += job * pixels_in * CHANNELS
    grad += job * pixels_out * CHANNELS
    sum_dy = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    sum_dy_r = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)  # of dy * (r - mean)
    for step in range(0, STEPS):
        pixel = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        is_real = (pixel < num_real)[:, None]
        grad_pointers = grad + pixel[:, None] * CHANNELS + channel[None, :]
        dy = tl.load(grad_pointers, mask=is_real, other=0.0).to(tl.float32)
        r = _load_rectified(z, pixel, width, channel, is_real, job_bias, CHANNELS, POOL, 0) * sign
        if POOL:
            for corner in tl.static_range(1, 4):
                r_corner = _load_rectified(
                    z, pixel, width, channel, is_real, job_bias, CHANNELS, POOL, corner
                )
                r = tl.maximum(r, r_corner * sign)
        sum_dy += dy
        sum_dy_r += dy * (r * sign - job_mean)
    inverse_std = tl.rsqrt(tl.load(var + columns) + eps)
    tl.store(sums + channel, tl.sum(sum_dy, axis=0))
    tl.store(sums + CHANNELS + channel, tl.sum(sum_dy_r, axis=0) * inverse_std)


@triton.jit
def _gradient_factors(
    sums, mean, var, weight, num_values, eps,
    CHANNELS: tl.constexpr, PARTIALS: tl.constexpr, PARTIALS_BLOCK: tl.constexpr,
    FROZEN: tl.constexpr,
):  # fmt: skip
    """Return factor, constant and slope of dz = factor * dy + constant + slope * r.

    Where the ReLU is active, dz is factor * (dy - mean of dy - x^ * mean of dy x^), and x^ is
    linear in r. Where FROZEN the two means do not count. Each is `[1, CHANNELS]`.
    """
    inverse_std = tl.rsqrt(tl.load(var) + eps)
    factor = tl.load(weight) * inverse_std
    sum_dy, sum_dy_x = add_partial_sums(sums, CHANNELS, PARTIALS, PARTIALS_BLOCK)
    moving = 0.0 if FROZEN else 1.0
    slope = -moving * factor * inverse_std * sum_dy_x / num_values
    constant = -moving * factor * sum_dy / num_values - slope * tl.load(mean)
    return factor[None, :], constant[None, :], slope[None, :]


@triton.jit
def _store_gradient_of_z(
    grad_z, r, dy, factors, pixel, width, channel, exists, is_real,
    CHANNELS: tl.constexpr, POOL: tl.constexpr, corner: tl.constexpr,
):  # fmt: skip
    """Write dz at one corner of the squares of these output pixels, and return it."""
    factor, constant, slope = factors
    dz = tl.where(is_real & (r > 0.0), factor * dy + (constant + slope * r), 0.0)
    offsets = _input_pixel(pixel, width, POOL, corner)[:, None] * CHANNELS + channel[None, :]
    tl.store(grad_z + offsets, dz.to(grad_z.dtype.element_ty), mask=exists)
    return dz


@triton.jit
def _store_gradient_of_squares(
    sum_dz, z, grad_z, dy, bias, sign, factors, pixel, width, channel, exists, is_real,
    CHANNELS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Write dz at all corners of these output pixels, and return sum_dz with it added."""
    r0 = _load_rectified(z, pixel, width, channel, exists, bias, CHANNELS, POOL, 0)
    if not POOL:
        return sum_dz + _store_gradient_of_z(
            grad_z, r0, dy, factors, pixel, width, channel, exists, is_real, CHANNELS, POOL, 0
        )
    r1 = _load_rectified(z, pixel, width, channel, exists, bias, CHANNELS, POOL, 1)
    r2 = _load_rectified(z, pixel, width, channel, exists, bias, CHANNELS, POOL, 2)
    r3 = _load_rectified(z, pixel, width, channel, exists, bias, CHANNELS, POOL, 3)
    r = (r0, r1, r2, r3)
    largest = largest_of_four(r0 * sign, r1 * sign, r2 * sign, r3 * sign) * sign
    corner_dy = gradients_of_max(largest, r0, r1, r2, dy)
    for corner in tl.static_range(4):
        sum_dz += _store_gradient_of_z(
            grad_z, r[corner], corner_dy[corner], factors,
            pixel, width, channel, exists, is_real, CHANNELS, POOL, corner,
        )  # fmt: skip
    return sum_dz


@triton.jit
def _store_zero_gradients(
    grad_z, pixel, exists, job_start, width, channel,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Write dz = 0 at all corners of these output pixels."""
    for corner in tl.static_range(4 if POOL else 1):
        row = job_start + _input_pixel(pixel, width, POOL, corner)
        offsets = row[:, None] * CHANNELS + channel[None, :]
        store_zeros(grad_z + offsets, exists, BLOCK, CHANNELS)


@triton.jit
def gradient_kernel(
    z, bias, mean, var, weight, grad, counts, sums, grad_z, grad_bias, eps,
    pixels_out, pixels_in, per_image, width,
    STEPS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr,
    PARTIALS: tl.constexpr, PARTIALS_BLOCK: tl.constexpr, FROZEN: tl.constexpr,
):  # fmt: skip
    """dz, and partial sums of it, which are the gradient of the bias.

    Where FROZEN, mean and variance are constants: dz is dy times its factor.
    """
    job = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    channel = tl.arange(0, CHANNELS)
    columns = job * CHANNELS + channel
    job_bias = tl.load(bias + columns).to(tl.float32)[None, :]
    num_real = (tl.load(counts + job) * per_image).to(tl.int32)
    grad_bias += (job * tl.num_programs(0) + program) * CHANNELS
    if program * STEPS * BLOCK >= num_real:  # nothing but padding
        for step in range(0, STEPS):
            pixel = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            exists = (pixel < pixels_out)[:, None]
            _store_zero_gradients(
                grad_z, pixel, exists, job * pixels_in, width, channel, CHANNELS, BLOCK, POOL
            )
        tl.store(grad_bias + channel, tl.zeros((CHANNELS,), dtype=tl.float32))
        return
    num_values = tl.maximum(num_real * (4 if POOL else 1), 1).to(tl.float32)
    job_sums = sums + job * PARTIALS * 2 * CHANNELS
    factors = _gradient_factors(
        job_sums, mean + columns, var + columns, weight + columns, num_values, eps,
        CHANNELS, PARTIALS, PARTIALS_BLOCK, FROZEN,
    )  # fmt: skip
    sign = tl.where(factors[0] < 0.0, -1.0, 1.0)  # as in `gradient_sums_kernel`
    z += job * pixels_in * CHANNELS
    grad_z += job * pixels_in * CHANNELS
    grad += job * pixels_out * CHANNELS
    sum_dz = tl.zeros((BLOCK, CHANNELS), dtype=tl.float32)
    for step in range(0, STEPS):
        pixel = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        exists = (pixel < pixels_out)[:, None]
        is_real = exists & (pixel < num_real)[:, None]
        grad_pointers = grad + pixel[:, None] * CHANNELS + channel[None, :]
        dy = tl.load(grad_pointers, mask=is_real, other=0.0).to(tl.float32)
        sum_dz = _store_gradient_of_squares(
            sum_dz, z, grad_z, dy, job_bias, sign, factors, pixel, width, channel, exists, is_real,
            CHANNELS, POOL,
        )  # fmt: skip
    tl.store(grad_bias + channel, tl.sum(sum_dz, axis=0))
