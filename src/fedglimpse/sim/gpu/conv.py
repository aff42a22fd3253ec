"""3x3 convolutions of J clients, each with its own weights, as two Triton kernels.

cuDNN runs such a stack as one grouped convolution and leaves most of the tensor cores idle when
groups are narrow. Here every client is an implicit matrix product on `[J, B, H, W, C]`:

    forward    rows are pixels, columns output channels, the sum runs over 9 taps x input channels
    input grad the same kernel, with flipped and transposed weights
    weight grad rows are kernel rows x input channels, columns output channels, the sum runs over
                pixels; the three kernel columns share what they read

Sums are in float32 and in a fixed order: results do not change from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedglimpse.sim.gpu.operators import named

TAPS = 9
_PART_PIXELS = 2048  # of a client that one program of the weight gradient sums, at least


def channels_of_kernel(channels: int) -> int:
    """Return how many channels the kernels need for a layer with so many: a power of two."""
    return max(triton.next_power_of_2(channels), 16)


@triton.jit
def _inside(row, column, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """True where a pixel lies in the image; a number below 0 is a large one without a sign."""
    return (row.to(tl.uint32) < HIGH) & (column.to(tl.uint32) < WIDE)


@triton.jit
def _forward_kernel(
    x, w, out, pixels,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile [BM pixels, BN channels] of one client."""
    job = tl.program_id(1).to(tl.int64)
    columns: tl.constexpr = CO // BN
    out_wide: tl.constexpr = WIDE + 2 * PAD - 2
    area: tl.constexpr = (HIGH + 2 * PAD - 2) * out_wide
    chunks: tl.constexpr = CI // BK
    m = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)  # pixel of the output
    n = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    row, column = m % area // out_wide - PAD, m % out_wide - PAD
    x += job * (pixels // area) * HIGH * WIDE * CI
    at = ((m // area * HIGH + row) * WIDE + column) * CI  # of the first tap
    w += job * 9 * CO * CI + n[None, :] * CI + k[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, 9 * chunks):
        tap, first = step // chunks, step % chunks * BK
        down, right = tap // 3, tap % 3
        inside = _inside(row + down, column + right, HIGH, WIDE) & (m < pixels)
        place = (at + (down * WIDE + right) * CI + first)[:, None] + k[None, :]
        some = tl.load(x + place, mask=inside[:, None], other=0.0)
        weights = tl.load(w + tap * CO * CI + first)
        total = tl.dot(some, weights, total, input_precision=PRECISION)
    place = job * pixels * CO + m[:, None] * CO + n[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(m < pixels)[:, None])


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
def _weight_kernel(
    x, grad, out, lines, STEPS: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Three tiles [BR kernel rows x inputs, BN outputs] of one client, one for each kernel column.

    The sum runs over one part of the client's lines of outputs, at each column of the input: there
    the three kernel columns meet the same input, and three neighbouring gradients.
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
    t0 = tl.zeros((BR, BN), dtype=tl.float32)
    t1, t2 = t0, t0
    for step in range(0, STEPS):
        m = (part * STEPS + step) * BM + tl.arange(0, BM)
        line, column = m // WIDE, m % WIDE
        there = line < lines
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
    out += (job * tl.num_programs(1) + part) * 9 * CI * CO
    out += (down * 3 * CI + r % CI)[:, None] * CO + n[None, :]
    keep = (down < 3)[:, None]
    tl.store(out, t0, mask=keep)
    tl.store(out + CI * CO, t1, mask=keep)
    tl.store(out + 2 * CI * CO, t2, mask=keep)


def _exact(x: Tensor) -> bool:
    """True where products must be of full float32."""
    return x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32


@torch.library.custom_op(named("conv3x3"), mutates_args=())
def conv3x3(x: Tensor, weight: Tensor, pad: int) -> Tensor:
    """Convolve every client's images with its own weights.

    Args:
        x: images, channels last.  # [J, B, H, W, CI]
        weight: taps in row-major order.  # [J, 9, CO, CI]
        pad: zeros around an image, 0 to 2.

    Returns:
        Images.  # [J, B, H + 2 pad - 2, W + 2 pad - 2, CO]
    """
    jobs, batch, high, wide, inputs = x.shape
    outputs = weight.shape[2]
    out = x.new_empty(jobs, batch, high + 2 * pad - 2, wide + 2 * pad - 2, outputs)
    pixels = batch * out.shape[2] * out.shape[3]
    exact = _exact(x)
    rows, columns = 128, min(outputs, 64 if exact else 128)
    deep = min(inputs, 64 if x.dtype == torch.bfloat16 else 32)
    grid = (triton.cdiv(pixels, rows) * (outputs // columns), jobs)
    _forward_kernel[grid](
        x, weight, out, pixels, high, wide, pad, inputs, outputs,
        rows, columns, deep, "ieee" if exact else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@torch.library.custom_op(named("conv3x3_weight_grad"), mutates_args=())
def conv3x3_weight_grad(x: Tensor, grad: Tensor, pad: int) -> Tensor:
    """Return the gradient of the weights in parts still to be summed `[J, P, 9, CI, CO]`, float32.

    Where float32 may be rounded to TF32, products are of two bf16 each instead: tensor cores take
    TF32 by rows only, and here sums run over pixels. They are more exact than TF32.
    """
    jobs, batch, high, wide, inputs = x.shape
    out_high, outputs = grad.shape[2], grad.shape[4]
    lines = batch * out_high
    rows, columns, deep = 64, min(outputs, 64), 64
    half = x.dtype == torch.bfloat16
    precision = "ieee" if _exact(x) else "tf32" if half else "split"
    if precision == "ieee":  # these products need more registers
        columns, deep = min(outputs, 32), 32
    parts = _parts_of(lines * wide)
    steps = triton.cdiv(lines * wide, parts * deep)
    out = torch.empty(jobs, parts, TAPS, inputs, outputs, device=x.device)
    grid = (triton.cdiv(3 * inputs, rows) * (outputs // columns), parts, jobs)
    _weight_kernel[grid](
        x, grad, out, lines, steps, high, wide, pad, inputs, outputs,
        rows, columns, deep, precision, num_warps=4, num_stages=3 if half else 1,
    )  # fmt: skip
    return out


def _parts_of(pixels: int) -> int:
    """Return by how many programs a client's weight gradient is summed."""
    return min(max(pixels // _PART_PIXELS, 1), 8)


@conv3x3.register_fake
def _(x: Tensor, weight: Tensor, pad: int) -> Tensor:
    jobs, batch, high, wide, _ = x.shape
    return x.new_empty(jobs, batch, high + 2 * pad - 2, wide + 2 * pad - 2, weight.shape[2])


@conv3x3_weight_grad.register_fake
def _(x: Tensor, grad: Tensor, pad: int) -> Tensor:
    parts = _parts_of(x.shape[1] * grad.shape[2] * x.shape[3])
    shape = (x.shape[0], parts, TAPS, x.shape[-1], grad.shape[-1])
    return x.new_empty(shape, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.pad = inputs[2]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:
    x, weight = ctx.saved_tensors
    grad = grad.contiguous()
    turned = weight.flip(1).transpose(2, 3).contiguous()  # [J, 9, CI, CO]
    of_weight = conv3x3_weight_grad(x, grad, ctx.pad).sum(1).transpose(2, 3).to(weight.dtype)
    of_x = conv3x3(grad, turned, 2 - ctx.pad) if ctx.needs_input_grad[0] else None
    return of_x, of_weight, None


conv3x3.register_autograd(_backward, setup_context=_keep)
