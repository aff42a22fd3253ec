"""The Triton kernels of `conv.py`, which says when each is used.

Images are `[J, B, HEIGHT, WIDTH, INPUTS]` and weights `[J, 9, OUTPUTS, INPUTS]`. A program works
for one client, on a tile of its result: some pixels, as rows, with some output channels, as
columns. A tap is one of the nine places of a 3x3 kernel. Tap t of output (row, column) reads input
(row + t // 3 - PAD, column + t % 3 - PAD), zero where that lies outside the image.

Flags that forward kernels share:

    COUNTED   only the first `counts[job]` images are real: the others become zeros and cost no
              products. Else all are real, and `counts` is not read.
    MOMENTS   also sum r and r^2 over a program's real pixels, r = ReLU(result + bias), while the
              result is in registers. Else `bias` and `sums` are not touched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedglimpse.simulation.cuda.kernel_helpers import rectified, store_zero_sums, store_zeros


@triton.jit
def _is_inside(row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """True where a pixel lies in the image; a number below 0 is a large one without a sign."""
    return (row.to(tl.uint32) < HEIGHT) & (column.to(tl.uint32) < WIDTH)


@triton.jit
def tile_kernel(
    x, weight, out, num_pixels, bias, counts, sums,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
    PRECISION: tl.constexpr, COUNTED: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """One tile `[BLOCK_PIXELS, BLOCK_OUTPUTS]`: nine taps x INPUTS, BLOCK_INPUTS at a time."""
    job = tl.program_id(1).to(tl.int64)
    TILES_ACROSS: tl.constexpr = OUTPUTS // BLOCK_OUTPUTS
    OUT_WIDTH: tl.constexpr = WIDTH + 2 * PAD - 2
    OUT_AREA: tl.constexpr = (HEIGHT + 2 * PAD - 2) * OUT_WIDTH
    INPUT_BLOCKS: tl.constexpr = INPUTS // BLOCK_INPUTS
    tile = tl.program_id(0) // TILES_ACROSS
    pixel = tile * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)  # of the result
    output = (tl.program_id(0) % TILES_ACROSS) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    input_channel = tl.arange(0, BLOCK_INPUTS)
    num_real = (tl.load(counts + job) * OUT_AREA).to(tl.int32) if COUNTED else num_pixels
    sums += (job * (tl.num_programs(0) // TILES_ACROSS) + tile) * 2 * OUTPUTS + output
    if tile * BLOCK_PIXELS >= num_real:  # nothing but padding
        offsets = job * num_pixels * OUTPUTS + pixel[:, None] * OUTPUTS + output[None, :]
        store_zeros(out + offsets, (pixel < num_pixels)[:, None], BLOCK_PIXELS, BLOCK_OUTPUTS)
        if MOMENTS:
            store_zero_sums(sums, OUTPUTS, BLOCK_OUTPUTS)
        return
    row = pixel % OUT_AREA // OUT_WIDTH - PAD  # that the first tap reads
    column = pixel % OUT_WIDTH - PAD
    x += job * (num_pixels // OUT_AREA) * HEIGHT * WIDTH * INPUTS
    first_tap = ((pixel // OUT_AREA * HEIGHT + row) * WIDTH + column) * INPUTS
    weight += job * 9 * OUTPUTS * INPUTS + output[None, :] * INPUTS + input_channel[:, None]
    total = tl.zeros((BLOCK_PIXELS, BLOCK_OUTPUTS), dtype=tl.float32)
    for step in range(0, 9 * INPUT_BLOCKS):
        tap = step // INPUT_BLOCKS
        first_input = step % INPUT_BLOCKS * BLOCK_INPUTS
        down = tap // 3
        right = tap % 3
        mask = _is_inside(row + down, column + right, HEIGHT, WIDTH) & (pixel < num_real)
        offsets = first_tap + (down * WIDTH + right) * INPUTS + first_input
        pixels = tl.load(
            x + (offsets[:, None] + input_channel[None, :]), mask=mask[:, None], other=0.0
        )
        weights = tl.load(weight + tap * OUTPUTS * INPUTS + first_input)
        total = tl.dot(pixels, weights, total, input_precision=PRECISION)
    offsets = job * num_pixels * OUTPUTS + pixel[:, None] * OUTPUTS + output[None, :]
    z = total.to(out.dtype.element_ty)
    tl.store(out + offsets, z, mask=(pixel < num_pixels)[:, None])
    if MOMENTS:
        job_bias = tl.load(bias + job * OUTPUTS + output)[None, :]
        r = rectified(z, job_bias, (pixel < num_real)[:, None])
        tl.store(sums, tl.sum(r, axis=0))
        tl.store(sums + OUTPUTS, tl.sum(r * r, axis=0))


@triton.jit
def _load_line_of_taps(
    weight, pair, single, line: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr
):  # fmt: skip
    """Load the taps of one line of the kernel: the left two together, and the right one."""
    TAP: tl.constexpr = OUTPUTS * INPUTS
    left_two = weight + (pair // INPUTS * TAP + pair % INPUTS)[:, None]
    right = weight + 2 * TAP + single[:, None]
    return tl.load(left_two + 3 * line * TAP), tl.load(right + 3 * line * TAP)


@triton.jit
def _add_line(pixel_pair, right_pixel, taps, total):
    """Add the products of three neighbouring pixels with one line of taps.

    The zero makes the compiler wait for them: totals that change names while a product is on its
    way would have it do one after the other.
    """
    total = tl.dot(pixel_pair, taps[0], total)
    return tl.dot(right_pixel, taps[1], total) + 0.0


@triton.jit
def _store_padding(
    out, sums, exists, LINE: tl.constexpr, HEIGHT: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Write zeros to every line of images that are padding."""
    for line in range(0, HEIGHT):
        store_zeros(out + line * LINE, exists, BLOCK_PIXELS, BLOCK_OUTPUTS)
    if MOMENTS:
        store_zero_sums(sums, OUTPUTS, BLOCK_OUTPUTS)


@triton.jit
def line_kernel(
    x, weight, out, num_images, bias, counts, sums,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
    COUNTED: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """BLOCK_OUTPUTS channels of BLOCK_PIXELS / WIDTH images, padded by one zero.

    A tile is one line of these images, and the program goes down the lines: `_roll_down`. The
    pixels at a tile's left and middle taps are loaded as a pair, which makes one product of double
    depth. WIDTH divides BLOCK_PIXELS.
    """
    job = tl.program_id(1).to(tl.int64)
    TILES_ACROSS: tl.constexpr = OUTPUTS // BLOCK_OUTPUTS
    IMAGES: tl.constexpr = BLOCK_PIXELS // WIDTH  # of a program
    cell = tl.arange(0, BLOCK_PIXELS)  # a column of one of these images
    single = tl.arange(0, INPUTS)
    pair = tl.arange(0, 2 * INPUTS)  # channels of two neighbouring pixels
    output = (tl.program_id(0) % TILES_ACROSS) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    program = tl.program_id(0) // TILES_ACROSS
    image = program * IMAGES + cell // WIDTH
    column = cell % WIDTH
    pixel = ((job * num_images + image) * HEIGHT * WIDTH + column)[:, None]  # of the first line
    exists = (image < num_images)[:, None]
    num_real = tl.load(counts + job).to(tl.int32) if COUNTED else num_images
    is_real = (image < num_real)[:, None]
    pair_mask = is_real & ((column[:, None] > 0) | (pair[None, :] >= INPUTS))
    pair_pointers = x + pixel * INPUTS + pair[None, :] - INPUTS
    right_pointers = x + pixel * INPUTS + single[None, :] + INPUTS
    right_mask = is_real & (column < WIDTH - 1)[:, None]
    out += pixel * OUTPUTS + output[None, :]
    sums += (job * (tl.num_programs(0) // TILES_ACROSS) + program) * 2 * OUTPUTS + output
    if program * IMAGES >= num_real:  # nothing but padding
        _store_padding(
            out, sums, exists, WIDTH * OUTPUTS, HEIGHT, OUTPUTS, BLOCK_PIXELS, BLOCK_OUTPUTS,
            MOMENTS,
        )  # fmt: skip
        return
    weight += job * 9 * OUTPUTS * INPUTS + output[None, :] * INPUTS
    top = _load_line_of_taps(weight, pair, single, 0, INPUTS, OUTPUTS)
    middle = _load_line_of_taps(weight, pair, single, 1, INPUTS, OUTPUTS)
    bottom = _load_line_of_taps(weight, pair, single, 2, INPUTS, OUTPUTS)
    _roll_down(
        pair_pointers, pair_mask, right_pointers, right_mask, top, middle, bottom,
        out, exists, is_real, bias + job * OUTPUTS + output, sums,
        HEIGHT, WIDTH, INPUTS, OUTPUTS, BLOCK_PIXELS, BLOCK_OUTPUTS, MOMENTS,
    )  # fmt: skip


@triton.jit
def _roll_down(
    pair_pointers, pair_mask, right_pointers, right_mask, top, middle, bottom,
    out, exists, is_real, bias, sums,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Read every line of the input once, and write every line of the result.

    A line of the input belongs to three lines of the result: the one above it through the bottom
    taps, its own through the middle ones, and the one below through the top ones. Their totals
    wait in registers; after this line the one above is complete.
    """
    IN_LINE: tl.constexpr = WIDTH * INPUTS
    OUT_LINE: tl.constexpr = WIDTH * OUTPUTS
    above = tl.zeros((BLOCK_PIXELS, BLOCK_OUTPUTS), dtype=tl.float32)
    beside = tl.zeros((BLOCK_PIXELS, BLOCK_OUTPUTS), dtype=tl.float32)
    sum_r = tl.zeros((BLOCK_PIXELS, BLOCK_OUTPUTS), dtype=tl.float32)
    sum_r2 = tl.zeros((BLOCK_PIXELS, BLOCK_OUTPUTS), dtype=tl.float32)
    if MOMENTS:
        job_bias = tl.load(bias)[None, :]
    for line in range(0, HEIGHT):
        pixel_pair = tl.load(pair_pointers + line * IN_LINE, mask=pair_mask, other=0.0)
        right_pixel = tl.load(right_pointers + line * IN_LINE, mask=right_mask, other=0.0)
        above = _add_line(pixel_pair, right_pixel, bottom, above)
        beside = _add_line(pixel_pair, right_pixel, middle, beside)
        below = tl.zeros((BLOCK_PIXELS, BLOCK_OUTPUTS), dtype=tl.float32)
        below = _add_line(pixel_pair, right_pixel, top, below)
        z = above.to(out.dtype.element_ty)
        tl.store(out + (line - 1) * OUT_LINE, z, mask=exists & (line > 0))
        if MOMENTS:
            r = rectified(z, job_bias, is_real & (line > 0))
            sum_r += r
            sum_r2 += r * r
        above = beside
        beside = below
    z = above.to(out.dtype.element_ty)
    tl.store(out + (HEIGHT - 1) * OUT_LINE, z, mask=exists)
    if MOMENTS:
        r = rectified(z, job_bias, is_real)
        tl.store(sums, tl.sum(sum_r + r, axis=0))
        tl.store(sums + OUTPUTS, tl.sum(sum_r2 + r * r, axis=0))


@triton.jit
def _factors(value, PRECISION: tl.constexpr):
    """Return what is multiplied: the value itself, or two bf16 numbers whose sum it is."""
    if PRECISION == "split":
        high = value.to(tl.bfloat16)
        return high, (value - high.to(tl.float32)).to(tl.bfloat16)
    else:  # noqa: RET505  (one of the two is compiled)
        return value, value


@triton.jit
def _add_product(a, b, total, PRECISION: tl.constexpr):
    """Add the product of two values, given as `_factors`, to a total."""
    if PRECISION == "split":  # the product of the two low parts is too small to count
        total = tl.dot(a[1], b[0], total)
        total = tl.dot(a[0], b[1], total)
        return tl.dot(a[0], b[0], total)
    else:  # noqa: RET505
        return tl.dot(a[0], b[0], total, input_precision=PRECISION)


@triton.jit
def _load_gradient(
    grad, line, column, is_real, output,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Load the gradient `[BLOCK_PIXELS, BLOCK_OUTPUTS]`, 0 outside the image, as `_factors`."""
    mask = is_real & (column.to(tl.uint32) < WIDTH)
    offsets = ((line * WIDTH + column) * OUTPUTS)[:, None] + output[None, :]
    return _factors(tl.load(grad + offsets, mask=mask[:, None], other=0.0), PRECISION)


@triton.jit
def _store_taps(
    out, left, middle, right, row, output, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr
):  # fmt: skip
    """Write the tiles of a kernel's three columns."""
    down = row // INPUTS
    out += (down * 3 * INPUTS + row % INPUTS)[:, None] * OUTPUTS + output[None, :]
    mask = (down < 3)[:, None]
    tl.store(out, left, mask=mask)
    tl.store(out + INPUTS * OUTPUTS, middle, mask=mask)
    tl.store(out + 2 * INPUTS * OUTPUTS, right, mask=mask)


@triton.jit
def weight_gradient_kernel(
    x, grad, out, counts, num_lines, STEPS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, BLOCK_PIXELS: tl.constexpr,
    PRECISION: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Partial sums of three tiles `[BLOCK_ROWS, BLOCK_OUTPUTS]`, one for each kernel column.

    A row is one input channel of one line of the kernel. The sum runs over STEPS x BLOCK_PIXELS
    pixels: all columns of the input beside some of the client's lines of outputs. At each of them
    the three kernel columns meet the same input and three neighbouring gradients, so x is read
    once for all three.
    """
    job = tl.program_id(2).to(tl.int64)
    partial = tl.program_id(1)
    TILES_ACROSS: tl.constexpr = OUTPUTS // BLOCK_OUTPUTS
    OUT_WIDTH: tl.constexpr = WIDTH + 2 * PAD - 2
    OUT_HEIGHT: tl.constexpr = HEIGHT + 2 * PAD - 2
    output = (tl.program_id(0) % TILES_ACROSS) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    kernel_row = (tl.program_id(0) // TILES_ACROSS) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    down = kernel_row // INPUTS
    row_offsets = (down * WIDTH * INPUTS + kernel_row % INPUTS)[None, :]
    x += job * (num_lines // OUT_HEIGHT) * HEIGHT * WIDTH * INPUTS
    grad += job * num_lines * OUT_WIDTH * OUTPUTS
    out += (job * tl.num_programs(1) + partial) * 9 * INPUTS * OUTPUTS
    num_real = (tl.load(counts + job) * OUT_HEIGHT).to(tl.int32) if COUNTED else num_lines
    left = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), dtype=tl.float32)
    if partial * STEPS * BLOCK_PIXELS >= num_real * WIDTH:  # nothing but padding
        _store_taps(out, left, left, left, kernel_row, output, INPUTS, OUTPUTS)
        return
    middle = left
    right = left
    for step in range(0, STEPS):
        pixel = (partial * STEPS + step) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
        line = pixel // WIDTH
        column = pixel % WIDTH
        is_real = line < num_real
        row = line % OUT_HEIGHT - PAD
        grad_column = column + PAD  # of the left tap
        grad0 = _load_gradient(
            grad, line, grad_column, is_real, output, OUTPUTS, OUT_WIDTH, PRECISION
        )
        grad1 = _load_gradient(
            grad, line, grad_column - 1, is_real, output, OUTPUTS, OUT_WIDTH, PRECISION
        )
        grad2 = _load_gradient(
            grad, line, grad_column - 2, is_real, output, OUTPUTS, OUT_WIDTH, PRECISION
        )
        is_inside = (row[:, None] + down[None, :]).to(tl.uint32) < HEIGHT
        mask = is_inside & (down < 3)[None, :] & is_real[:, None]
        pixel_offsets = ((line // OUT_HEIGHT * HEIGHT + row) * WIDTH + column) * INPUTS
        inputs = tl.load(x + pixel_offsets[:, None] + row_offsets, mask=mask, other=0.0)
        factors = _factors(inputs, PRECISION)
        factors = (tl.trans(factors[0]), tl.trans(factors[1]))  # rows are summed over
        left = _add_product(factors, grad0, left, PRECISION)
        middle = _add_product(factors, grad1, middle, PRECISION)
        right = _add_product(factors, grad2, right, PRECISION)
    _store_taps(out, left, middle, right, kernel_row, output, INPUTS, OUTPUTS)
