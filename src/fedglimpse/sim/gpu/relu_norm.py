"""ReLU, BatchNorm and 2x2 max-pooling of J clients in as few passes over memory as possible.

The client models put these behind every convolution: y = pool(BatchNorm(ReLU(z + bias))). Written
layer by layer they read and write the activations a dozen times a step; here

    forward   reads z twice (statistics, then result) and writes y
    backward  reads z and the gradient twice (sums, then result) and writes the gradient of z

Everything between is recomputed in registers. Sums are in float32 and in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 32  # programs that share a client's pixels
_TILE = 2048  # numbers of z that a program holds at a time, and twice as many where it only writes


@triton.jit
def _moments_kernel(z, bias, counts, out, rows, per_image, STEPS: tl.constexpr, C: tl.constexpr,
                    BM: tl.constexpr):  # fmt: skip
    """Sums of r and r^2, r = ReLU(z + bias), over one part of a client's real pixels."""
    job, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    c = tl.arange(0, C)
    b = tl.load(bias + job * C + c).to(tl.float32)[None, :]
    real = tl.minimum(tl.load(counts + job) * per_image, rows)
    first = tl.zeros((BM, C), dtype=tl.float32)
    second = tl.zeros((BM, C), dtype=tl.float32)
    for step in range(0, STEPS):
        m = (part * STEPS + step) * BM + tl.arange(0, BM)
        keep = (m < real)[:, None]
        value = tl.load(z + (job * rows + m)[:, None] * C + c[None, :], mask=keep, other=0.0)
        r = tl.where(keep, tl.maximum(value.to(tl.float32) + b, 0.0), 0.0)
        first += r
        second += r * r
    out += (job * tl.num_programs(0) + part) * 2 * C
    tl.store(out + c, tl.sum(first, axis=0))
    tl.store(out + C + c, tl.sum(second, axis=0))


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
def _result_kernel(z, bias, scale, shift, out, rows_out, rows_in, wide,
                   C: tl.constexpr, BM: tl.constexpr, POOL: tl.constexpr):  # fmt: skip
    """Write ReLU(z + bias) * scale + shift, or the largest of each 2x2 square of it."""
    job = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.arange(0, C)
    keep = (m < rows_out)[:, None]
    b = tl.load(bias + job * C + c).to(tl.float32)[None, :]
    s = tl.load(scale + job * C + c)[None, :]
    t = tl.load(shift + job * C + c)[None, :]
    best = tl.full((BM, C), float("-inf"), dtype=tl.float32)
    for corner in tl.static_range(4 if POOL else 1):
        place = (job * rows_in + _place(m, wide, POOL, corner))[:, None] * C + c[None, :]
        value = tl.load(z + place, mask=keep, other=0.0).to(tl.float32)
        best = tl.maximum(best, tl.maximum(value + b, 0.0) * s + t)
    place = (job * rows_out + m)[:, None] * C + c[None, :]
    tl.store(out + place, best.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _corner(z, m, wide, c, keep, b, C: tl.constexpr, POOL: tl.constexpr, corner: tl.constexpr):
    """Load ReLU(z + bias) at one corner of the squares of outputs m: [BM, C]."""
    place = _place(m, wide, POOL, corner)[:, None] * C + c[None, :]
    return tl.maximum(tl.load(z + place, mask=keep, other=0.0).to(tl.float32) + b, 0.0)


@triton.jit
def _sums_kernel(z, bias, mean, inverse, weight, grad, counts, out, rows_out, rows_in, per_image,
                 wide, STEPS: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
                 POOL: tl.constexpr):  # fmt: skip
    """Sums of dy and dy * x^ (the gradients of beta and weight), by parts."""
    job, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    c = tl.arange(0, C)
    at = job * C + c
    b = tl.load(bias + at).to(tl.float32)[None, :]
    mu = tl.load(mean + at)[None, :]
    sign = tl.where((tl.load(weight + at) < 0.0) & POOL, -1.0, 1.0)[None, :]
    real = tl.minimum(tl.load(counts + job) * per_image, rows_out)
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
    out += (job * tl.num_programs(0) + part) * 2 * C
    tl.store(out + c, tl.sum(first, axis=0))
    tl.store(out + C + c, tl.sum(second, axis=0) * tl.load(inverse + at))


@triton.jit
def _shares(r0, r1, r2, r3, sign, dy):
    """Give dy to the first of the four that pooling would pick."""
    best = tl.maximum(tl.maximum(r0 * sign, r1 * sign), tl.maximum(r2 * sign, r3 * sign)) * sign
    d0 = tl.where(r0 == best, dy, 0.0)
    dy = tl.where(r0 == best, 0.0, dy)
    d1 = tl.where(r1 == best, dy, 0.0)
    dy = tl.where(r1 == best, 0.0, dy)
    d2 = tl.where(r2 == best, dy, 0.0)
    return d0, d1, d2, tl.where(r2 == best, 0.0, dy)


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
def _back_kernel(z, bias, mean, inverse, weight, grad, sums, counts, out, of_bias,
                 rows_out, rows_in, per_image, wide, STEPS: tl.constexpr, C: tl.constexpr,
                 BM: tl.constexpr, POOL: tl.constexpr):  # fmt: skip
    """dz, and by parts its sum (the gradient of the bias)."""
    job, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    c = tl.arange(0, C)
    at = job * C + c
    b = tl.load(bias + at).to(tl.float32)[None, :]
    count = tl.load(counts + job) * per_image  # real output pixels
    inv = tl.load(inverse + at)
    factor = tl.load(weight + at) * inv
    total = tl.maximum(count * (4 if POOL else 1), 1).to(tl.float32)
    tilt = -factor * inv * tl.load(sums + job * 2 * C + C + c) / total
    level = -factor * tl.load(sums + job * 2 * C + c) / total - tilt * tl.load(mean + at)
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
            d0, d1, d2, d3 = _shares(r0, r1, r2, r3, sign, dy)
            s += _put(out, m, wide, c, keep, real, r0, d0, a, level, slope, C, POOL, 0)
            s += _put(out, m, wide, c, keep, real, r1, d1, a, level, slope, C, POOL, 1)
            s += _put(out, m, wide, c, keep, real, r2, d2, a, level, slope, C, POOL, 2)
            s += _put(out, m, wide, c, keep, real, r3, d3, a, level, slope, C, POOL, 3)
        else:
            s += _put(out, m, wide, c, keep, real, r0, dy, a, level, slope, C, POOL, 0)
    tl.store(of_bias + (job * tl.num_programs(0) + part) * C + c, tl.sum(s, axis=0))


def _tiles(rows: int, channels: int, numbers: int) -> tuple[int, int, int]:
    """Return rows of a tile, steps of a program, and programs for a client."""
    tile = max(numbers // channels, 16)
    parts = min(_PARTS, triton.cdiv(rows, tile))
    return tile, triton.cdiv(rows, parts * tile), parts


@torch.library.custom_op("fedglimpse::relu_norm", mutates_args=())
def relu_norm(
    z: Tensor, bias: Tensor, weight: Tensor, beta: Tensor, counts: Tensor, eps: float, pool: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pool(BatchNorm(ReLU(z + bias))) with the batch's own statistics, mean and variance.

    Args:
        z: outputs of a convolution; even-sided where pooled.  # [J, B, H, W, C]
        bias: of that convolution.  # [J, C]
        weight: of the norm.  # [J, C]
        beta: the norm's bias.  # [J, C]
        counts: real images of each client; the rest is padding.  # [J] int64
        eps: of the norm.
        pool: 2x2 max-pooling.

    Returns:
        y `[J, B, H', W', C]`, mean `[J, C]` and biased variance `[J, C]`.
    """
    jobs, batch, high, wide, channels = z.shape
    rows = batch * high * wide
    tile, steps, parts = _tiles(rows, channels, _TILE)
    partial = torch.empty(jobs, parts, 2, channels, device=z.device)
    _moments_kernel[(parts, jobs)](
        z, bias, counts, partial, rows, high * wide, steps, channels, tile
    )  # fmt: skip
    total = (counts * high * wide).clamp(min=1)[:, None]
    moments = partial.sum(1) / total[:, None]  # [J, 2, C]
    mean = moments[:, 0].contiguous()
    var = (moments[:, 1] - mean * mean).clamp(min=0)
    scale = weight.float() * torch.rsqrt(var + eps)
    shift = beta.float() - mean * scale
    return relu_affine(z, bias, scale, shift, pool), mean, var


def relu_affine(z: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, pool: bool) -> Tensor:
    """Return pool(ReLU(z + bias) * scale + shift), without a gradient.

    Args:
        z: outputs of a convolution; even-sided where pooled.  # [J, B, H, W, C]
        bias: of that convolution.  # [J, C]
        scale: float32.  # [J, C]
        shift: float32.  # [J, C]
        pool: 2x2 max-pooling.
    """
    jobs, batch, high, wide, channels = z.shape
    rows = batch * high * wide
    tile, rows_out = _tiles(rows, channels, 2 * _TILE)[0], rows // (4 if pool else 1)
    out = z.new_empty(jobs, batch, high // (1 + pool), wide // (1 + pool), channels)
    _result_kernel[(triton.cdiv(rows_out, tile), jobs)](
        z, bias.contiguous(), scale.contiguous(), shift.contiguous(), out,
        rows_out, rows, wide, channels, tile, pool,
    )  # fmt: skip
    return out


@torch.library.custom_op("fedglimpse::relu_norm_back", mutates_args=())
def relu_norm_back(
    grad: Tensor, z: Tensor, bias: Tensor, weight: Tensor, counts: Tensor,
    mean: Tensor, var: Tensor, eps: float, pool: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of z, bias, weight and beta."""
    jobs, batch, high, wide, channels = z.shape
    rows, rows_out = batch * high * wide, grad.shape[1] * grad.shape[2] * grad.shape[3]
    tile, steps, parts = _tiles(rows_out, channels, _TILE // 2 if pool else _TILE)
    inverse = torch.rsqrt(var + eps)
    out = torch.empty_like(z)
    partial = torch.empty(jobs, parts, 2, channels, device=z.device)
    of_bias = torch.empty(jobs, parts, channels, device=z.device)
    sizes = (rows_out, rows, grad.shape[2] * grad.shape[3], wide, steps, channels, tile, pool)
    _sums_kernel[(parts, jobs)](
        z, bias, mean, inverse, weight, grad, counts, partial, *sizes
    )  # fmt: skip
    sums = partial.sum(1)  # [J, 2, C]
    _back_kernel[(parts, jobs)](
        z, bias, mean, inverse, weight, grad, sums, counts, out, of_bias, *sizes
    )  # fmt: skip
    return out, of_bias.sum(1), sums[:, 1].clone(), sums[:, 0].clone()


@relu_norm.register_fake
def _(z, bias, weight, beta, counts, eps, pool):
    jobs, batch, high, wide, channels = z.shape
    out = z.new_empty(jobs, batch, high // (1 + pool), wide // (1 + pool), channels)
    mean = z.new_empty(jobs, channels, dtype=torch.float32)
    return out, mean, torch.empty_like(mean)


@relu_norm_back.register_fake
def _(grad, z, bias, weight, counts, mean, var, eps, pool):
    return torch.empty_like(z), *(torch.empty_like(mean) for _ in range(3))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, bias, weight, _, counts, ctx.eps, ctx.pool = inputs
    ctx.save_for_backward(z, bias, weight, counts, output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grads = relu_norm_back(grad.contiguous(), *ctx.saved_tensors, ctx.eps, ctx.pool)
    return *grads, None, None, None


relu_norm.register_autograd(_backward, setup_context=_keep)
