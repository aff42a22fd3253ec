"""The Triton kernels of `first_layer.py`, which says what they compute and why.

Quads are the 2x2 squares of outputs. A client's quads are numbered image by image, row by row:
`num_quads` are all of them, `per_image` those of an image, `across` those of a row. A program takes
STEPS tiles of BLOCK quads, one after the other, each with all OUTPUTS channels.

The four corners of a quad are numbered row by row. Together they see 4x4 pixels of x, its patch,
loaded as one row of DEPTH numbers: 16 pixels x INPUTS channels, filled up to what tensor cores
take. A corner's nine taps per input channel lie in those 16 places, zeros elsewhere, as one matrix
`[DEPTH, OUTPUTS]`. So the outputs of a corner are one product of patches and taps.

In the formulas z is the result of the convolution without its bias, r is ReLU(z + bias), x^ the
normalised r, and dy and dz are gradients. x has its zeros around every image. The first
`counts[job]` images of a client are real; the others are padding.
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
def _images_of_job(x, job, num_quads, per_image, across, INPUTS: tl.constexpr):
    """Return where a client's images begin."""
    pixels = (2 * (per_image // across) + 2) * (2 * across + 2)  # of an image and its zeros
    return x + job * (num_quads // per_image) * pixels * INPUTS


@triton.jit
def _load_patches(
    x, quad, num_quads, per_image, across, INPUTS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Load the 4x4 pixels that every quad sees: `[BLOCK, DEPTH]`, number = input * 16 + pixel."""
    width = 2 * across + 2
    height = 2 * (per_image // across) + 2
    number = tl.arange(0, DEPTH)
    number_offsets = ((number % 16) // 4 * width + number % 4) * INPUTS + number // 16
    quad = tl.minimum(quad, num_quads - 1)
    row = 2 * (quad % per_image // across)
    quad_offsets = ((quad // per_image * height + row) * width + 2 * (quad % across)) * INPUTS
    pointers = x + quad_offsets[:, None] + number_offsets[None, :]
    return tl.load(pointers, mask=(number < 16 * INPUTS)[None, :], other=0.0)


@triton.jit
def _load_taps_of_corner(
    weight, sign, dtype: tl.constexpr, corner: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Load one corner's taps, 9 of each 16 places filled: `[DEPTH, OUTPUTS]`."""
    number = tl.arange(0, DEPTH)[:, None]
    row = number % 16 // 4 - corner // 2
    column = number % 4 - corner % 2
    is_tap = (row >= 0) & (row < 3) & (column >= 0) & (column < 3) & (number < 16 * INPUTS)
    output_offsets = tl.arange(0, OUTPUTS)[None, :] * 9 * INPUTS
    offsets = output_offsets + number // 16 * 9 + row * 3 + column
    return (tl.load(weight + offsets, mask=is_tap, other=0.0) * sign).to(dtype)


@triton.jit
def _load_taps(
    weight, job, sign, dtype: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Load the taps of the four corners, times a sign for every output channel."""
    weight += job * 9 * INPUTS * OUTPUTS
    return (
        _load_taps_of_corner(weight, sign, dtype, 0, INPUTS, OUTPUTS, DEPTH),
        _load_taps_of_corner(weight, sign, dtype, 1, INPUTS, OUTPUTS, DEPTH),
        _load_taps_of_corner(weight, sign, dtype, 2, INPUTS, OUTPUTS, DEPTH),
        _load_taps_of_corner(weight, sign, dtype, 3, INPUTS, OUTPUTS, DEPTH),
    )


@triton.jit
def _convolve_corners(patches, taps, PRECISION: tl.constexpr):
    """Return z at the four corners, `[BLOCK, OUTPUTS]` each."""
    return (
        tl.dot(patches, taps[0], input_precision=PRECISION),
        tl.dot(patches, taps[1], input_precision=PRECISION),
        tl.dot(patches, taps[2], input_precision=PRECISION),
        tl.dot(patches, taps[3], input_precision=PRECISION),
    )


@triton.jit
def _pooled_r(patches, taps, sign, bias, PRECISION: tl.constexpr):
    """Return the r that pooling picks: the largest, or the smallest where the scale is below 0.

    The taps carry the sign of the scale, so that it is the largest of the four z in both cases.
    """
    z = _convolve_corners(patches, taps, PRECISION)
    return tl.maximum(largest_of_four(z[0], z[1], z[2], z[3]) * sign + bias, 0.0)


@triton.jit
def _output_pixel(quad, across, corner: tl.constexpr):
    """Return the output pixel of a corner of a quad."""
    row = 2 * (quad // across) + corner // 2
    return row * (2 * across) + 2 * (quad % across) + corner % 2


@triton.jit
def moments_kernel(
    x, weight, bias, counts, sums, num_quads, per_image, across,
    STEPS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial sums of r and r^2 over a client's real pixels."""
    job = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    x = _images_of_job(x, job, num_quads, per_image, across, INPUTS)
    channel = tl.arange(0, OUTPUTS)
    num_real = (tl.load(counts + job) * per_image).to(tl.int32)
    sums += (job * tl.num_programs(0) + program) * 2 * OUTPUTS
    if program * STEPS * BLOCK >= num_real:  # nothing but padding
        store_zero_sums(sums + channel, OUTPUTS, OUTPUTS)
        return
    taps = _load_taps(weight, job, 1.0, x.dtype.element_ty, INPUTS, OUTPUTS, DEPTH)
    job_bias = tl.load(bias + job * OUTPUTS + channel)[None, :]
    sum_r = tl.zeros((BLOCK, OUTPUTS), dtype=tl.float32)
    sum_r2 = tl.zeros((BLOCK, OUTPUTS), dtype=tl.float32)
    for step in range(0, STEPS):
        quad = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        is_real = (quad < num_real)[:, None]
        patches = _load_patches(x, quad, num_quads, per_image, across, INPUTS, DEPTH)
        for corner in tl.static_range(4):
            z = tl.dot(patches, taps[corner], input_precision=PRECISION)
            r = tl.where(is_real, tl.maximum(z + job_bias, 0.0), 0.0)
            sum_r += r
            sum_r2 += r * r
    tl.store(sums + channel, tl.sum(sum_r, axis=0))
    tl.store(sums + OUTPUTS + channel, tl.sum(sum_r2, axis=0))


@triton.jit
def _store_zero_quads(
    out, quad, exists, channel, across,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Write y = 0 for these quads."""
    for corner in tl.static_range(1 if POOL else 4):
        pixel = quad if POOL else _output_pixel(quad, across, corner)
        store_zeros(out + pixel[:, None] * OUTPUTS + channel[None, :], exists, BLOCK, OUTPUTS)


@triton.jit
def result_kernel(
    x, weight, bias, gamma, beta, counts, sums, mean, var, out, eps, num_quads, per_image, across,
    STEPS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, PARTIALS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Write the statistics and y of some of a client's quads; zeros for padding."""
    job = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    x = _images_of_job(x, job, num_quads, per_image, across, INPUTS)
    channel = tl.arange(0, OUTPUTS)
    columns = job * OUTPUTS + channel
    num_real = (tl.load(counts + job) * per_image).to(tl.int32)
    num_values = tl.maximum(num_real * 4, 1).to(tl.float32)
    job_sums = sums + job * PARTIALS * 2 * OUTPUTS
    sum_r, sum_r2 = add_partial_sums(job_sums, OUTPUTS, PARTIALS, PARTIALS)
    mean_r = sum_r / num_values
    var_r = tl.maximum(sum_r2 / num_values - mean_r * mean_r, 0.0)
    is_first = (channel >= 0) & (program == 0)  # one program writes them
    tl.store(mean + columns, mean_r, mask=is_first)
    tl.store(var + columns, var_r, mask=is_first)
    out += job * num_quads * OUTPUTS * (1 if POOL else 4)
    if program * STEPS * BLOCK >= num_real:  # nothing but padding
        for step in range(0, STEPS):
            quad = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
            exists = (quad < num_quads)[:, None]
            _store_zero_quads(out, quad, exists, channel, across, OUTPUTS, BLOCK, POOL)
        return
    scale = tl.load(gamma + columns) * tl.rsqrt(var_r + eps)
    shift = (tl.load(beta + columns) - mean_r * scale)[None, :]
    sign = tl.where((scale < 0.0) & POOL, -1.0, 1.0)[None, :]
    scale = scale[None, :]
    job_bias = tl.load(bias + columns)[None, :]
    taps = _load_taps(weight, job, sign, x.dtype.element_ty, INPUTS, OUTPUTS, DEPTH)
    for step in range(0, STEPS):
        quad = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        exists = (quad < num_quads)[:, None]
        is_real = (quad < num_real)[:, None]
        patches = _load_patches(x, quad, num_quads, per_image, across, INPUTS, DEPTH)
        for corner in tl.static_range(1 if POOL else 4):
            if POOL:
                r = _pooled_r(patches, taps, sign, job_bias, PRECISION)
                pixel = quad
            else:
                z = tl.dot(patches, taps[corner], input_precision=PRECISION)
                r = tl.maximum(z + job_bias, 0.0)
                pixel = _output_pixel(quad, across, corner)
            y = tl.where(is_real, r * scale + shift, 0.0).to(out.dtype.element_ty)
            tl.store(out + pixel[:, None] * OUTPUTS + channel[None, :], y, mask=exists)


@triton.jit
def _load_gradient(
    grad, quad, channel, mask, across,
    OUTPUTS: tl.constexpr, POOL: tl.constexpr, corner: tl.constexpr,
):  # fmt: skip
    """Load dy of these quads in float32, of one corner of them where they are not pooled."""
    if POOL:
        pointers = grad + quad[:, None] * OUTPUTS + channel[None, :]
    else:
        pixel = _output_pixel(quad, across, corner)
        pointers = grad + (pixel[:, None] * OUTPUTS + channel[None, :])
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def gradient_sums_kernel(
    x, weight, bias, gamma, counts, mean, var, grad, sums, eps, num_quads, per_image, across,
    STEPS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Partial sums of dy and dy * x^, which are the gradients of beta and gamma."""
    job = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    x = _images_of_job(x, job, num_quads, per_image, across, INPUTS)
    channel = tl.arange(0, OUTPUTS)
    columns = job * OUTPUTS + channel
    num_real = (tl.load(counts + job) * per_image).to(tl.int32)
    sums += (job * tl.num_programs(0) + program) * 2 * OUTPUTS
    if program * STEPS * BLOCK >= num_real:  # nothing but padding
        store_zero_sums(sums + channel, OUTPUTS, OUTPUTS)
        return
    job_mean = tl.load(mean + columns)[None, :]
    job_bias = tl.load(bias + columns)[None, :]
    sign = tl.where((tl.load(gamma + columns) < 0.0) & POOL, -1.0, 1.0)[None, :]
    taps = _load_taps(weight, job, sign, x.dtype.element_ty, INPUTS, OUTPUTS, DEPTH)
    grad += job * num_quads * OUTPUTS * (1 if POOL else 4)
    sum_dy = tl.zeros((BLOCK, OUTPUTS), dtype=tl.float32)
    sum_dy_r = tl.zeros((BLOCK, OUTPUTS), dtype=tl.float32)  # of dy * (r - mean)
    for step in range(0, STEPS):
        quad = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        is_real = (quad < num_real)[:, None]
        patches = _load_patches(x, quad, num_quads, per_image, across, INPUTS, DEPTH)
        for corner in tl.static_range(1 if POOL else 4):
            dy = _load_gradient(grad, quad, channel, is_real, across, OUTPUTS, POOL, corner)
            if POOL:
                r = _pooled_r(patches, taps, sign, job_bias, PRECISION)
            else:
                z = tl.dot(patches, taps[corner], input_precision=PRECISION)
                r = tl.maximum(z + job_bias, 0.0)
            sum_dy += dy
            sum_dy_r += dy * (r - job_mean)
    inverse_std = tl.rsqrt(tl.load(var + columns) + eps)
    tl.store(sums + channel, tl.sum(sum_dy, axis=0))
    tl.store(sums + OUTPUTS + channel, tl.sum(sum_dy_r, axis=0) * inverse_std)


@triton.jit
def _gradient_factors(
    sums, mean, var, gamma, num_values, eps, OUTPUTS: tl.constexpr, PARTIALS: tl.constexpr
):  # fmt: skip
    """Return factor, constant and slope of dz = factor * dy + constant + slope * r.

    Where the ReLU is active, dz is factor * (dy - mean of dy - x^ * mean of dy x^), and x^ is
    linear in r. Each is `[1, OUTPUTS]`.
    """
    sum_dy, sum_dy_x = add_partial_sums(sums, OUTPUTS, PARTIALS, PARTIALS)
    inverse_std = tl.rsqrt(tl.load(var) + eps)
    factor = tl.load(gamma) * inverse_std
    slope = -factor * inverse_std * sum_dy_x / num_values
    constant = -factor * sum_dy / num_values - slope * tl.load(mean)
    return factor[None, :], constant[None, :], slope[None, :]


@triton.jit
def _add_corner(total, sum_dz, patches, z, dy, coefficients, PRECISION: tl.constexpr):
    """Add one corner's share to the gradient of its taps, `total`, and to the sum of dz.

    `z` carries the sign of the taps that it was made with.
    """
    is_real, sign, bias, factor, constant, slope = coefficients
    z = z * sign + bias
    dz = tl.where(is_real & (z > 0.0), factor * dy + (constant + slope * z), 0.0)
    total = tl.dot(tl.trans(patches), dz.to(patches.dtype), total, input_precision=PRECISION)
    return total, sum_dz + dz


@triton.jit
def _add_unpooled_corner(
    total, sum_dz, tile,
    corner: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Do `_add_corner` for one corner of quads that are not pooled."""
    patches, taps, grad, quad, channel, across, coefficients = tile
    z = tl.dot(patches, taps[corner], input_precision=PRECISION)
    dy = _load_gradient(grad, quad, channel, coefficients[0], across, OUTPUTS, False, corner)
    return _add_corner(total, sum_dz, patches, z, dy, coefficients, PRECISION)


@triton.jit
def _add_tile(
    totals, sum_dz, patches, taps, grad, quad, channel, across, coefficients,
    OUTPUTS: tl.constexpr, PRECISION: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Do `_add_corner` for the four corners of a tile; returns the four totals and sum_dz."""
    t0, t1, t2, t3 = totals
    if POOL:
        z = _convolve_corners(patches, taps, PRECISION)
        dy = _load_gradient(grad, quad, channel, coefficients[0], across, OUTPUTS, POOL, 0)
        largest = largest_of_four(z[0], z[1], z[2], z[3])
        dy = gradients_of_max(largest, z[0], z[1], z[2], dy)
        t0, sum_dz = _add_corner(t0, sum_dz, patches, z[0], dy[0], coefficients, PRECISION)
        t1, sum_dz = _add_corner(t1, sum_dz, patches, z[1], dy[1], coefficients, PRECISION)
        t2, sum_dz = _add_corner(t2, sum_dz, patches, z[2], dy[2], coefficients, PRECISION)
        t3, sum_dz = _add_corner(t3, sum_dz, patches, z[3], dy[3], coefficients, PRECISION)
    else:
        tile = (patches, taps, grad, quad, channel, across, coefficients)
        t0, sum_dz = _add_unpooled_corner(t0, sum_dz, tile, 0, OUTPUTS, PRECISION)
        t1, sum_dz = _add_unpooled_corner(t1, sum_dz, tile, 1, OUTPUTS, PRECISION)
        t2, sum_dz = _add_unpooled_corner(t2, sum_dz, tile, 2, OUTPUTS, PRECISION)
        t3, sum_dz = _add_unpooled_corner(t3, sum_dz, tile, 3, OUTPUTS, PRECISION)
    return t0, t1, t2, t3, sum_dz


@triton.jit
def _store_corner(
    out, total, corner: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one corner's taps."""
    number = tl.arange(0, DEPTH)[:, None]
    offsets = number * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    tl.store(out + corner * 16 * INPUTS * OUTPUTS + offsets, total, mask=number < 16 * INPUTS)


@triton.jit
def weight_gradients_kernel(
    x, weight, bias, gamma, counts, mean, var, grad, sums, grad_bias, grad_weight, eps,
    num_quads, per_image, across,
    STEPS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, PARTIALS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Partial sums of the gradients of the bias and of each corner's taps."""
    job = tl.program_id(1).to(tl.int64)
    program = tl.program_id(0)
    x = _images_of_job(x, job, num_quads, per_image, across, INPUTS)
    channel = tl.arange(0, OUTPUTS)
    columns = job * OUTPUTS + channel
    num_real = (tl.load(counts + job) * per_image).to(tl.int32)
    grad_bias += (job * tl.num_programs(0) + program) * OUTPUTS + channel
    grad_weight += (job * tl.num_programs(0) + program) * 4 * 16 * INPUTS * OUTPUTS
    zeros = tl.zeros((DEPTH, OUTPUTS), dtype=tl.float32)
    if program * STEPS * BLOCK >= num_real:  # nothing but padding
        tl.store(grad_bias, tl.zeros((OUTPUTS,), dtype=tl.float32))
        for corner in tl.static_range(4):
            _store_corner(grad_weight, zeros, corner, INPUTS, OUTPUTS, DEPTH)
        return
    job_bias = tl.load(bias + columns)[None, :]
    num_values = tl.maximum(num_real * 4, 1).to(tl.float32)
    factor, constant, slope = _gradient_factors(
        sums + job * PARTIALS * 2 * OUTPUTS, mean + columns, var + columns, gamma + columns,
        num_values, eps, OUTPUTS, PARTIALS,
    )  # fmt: skip
    sign = tl.where((factor < 0.0) & POOL, -1.0, 1.0)
    taps = _load_taps(weight, job, sign, x.dtype.element_ty, INPUTS, OUTPUTS, DEPTH)
    grad += job * num_quads * OUTPUTS * (1 if POOL else 4)
    t0 = zeros
    t1 = zeros
    t2 = zeros
    t3 = zeros
    sum_dz = tl.zeros((BLOCK, OUTPUTS), dtype=tl.float32)
    for step in range(0, STEPS):
        quad = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        is_real = (quad < num_real)[:, None]
        patches = _load_patches(x, quad, num_quads, per_image, across, INPUTS, DEPTH)
        coefficients = (is_real, sign, job_bias, factor, constant, slope)
        t0, t1, t2, t3, sum_dz = _add_tile(
            (t0, t1, t2, t3), sum_dz, patches, taps, grad, quad, channel, across, coefficients,
            OUTPUTS, PRECISION, POOL,
        )  # fmt: skip
    tl.store(grad_bias, tl.sum(sum_dz, axis=0))
    _store_corner(grad_weight, t0, 0, INPUTS, OUTPUTS, DEPTH)
    _store_corner(grad_weight, t1, 1, INPUTS, OUTPUTS, DEPTH)
    _store_corner(grad_weight, t2, 2, INPUTS, OUTPUTS, DEPTH)
    _store_corner(grad_weight, t3, 3, INPUTS, OUTPUTS, DEPTH)
