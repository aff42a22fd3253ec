"""3x3 convolutions of J clients, each with its own weights, as two Triton kernels.

cuDNN runs such a stack as one grouped convolution and leaves most of the tensor cores idle when
groups are narrow. Here every client is an implicit matrix product on `[J, B, H, W, C]`:

    forward    rows are pixels, columns output channels, the sum runs over 9 taps x input channels
    input grad the same kernel, with flipped and transposed weights
    weight grad rows are taps x input channels, columns output channels, the sum runs over pixels

Sums are in float32 and in a fixed order: results do not change from run to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TAPS = 9
_WEIGHT_ROWS, _WEIGHT_PIXELS = 64, 64  # tile of the weight gradient
_SPLIT_PIXELS = 16384  # above so many pixels a client's weight gradient is summed in 4 parts


def supported(inputs: int, outputs: int) -> bool:
    """True where the kernels take such a layer: powers of two from 16 channels on."""
    return all(c >= 16 and c & (c - 1) == 0 for c in (inputs, outputs))


@triton.jit
def _forward_kernel(
    x, w, out, pixels, high, wide, out_high, out_wide, pad,
    CI: tl.constexpr, CO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile [BM pixels, BN channels] of one client."""
    job = tl.program_id(1).to(tl.int64)
    columns: tl.constexpr = CO // BN
    m = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)  # pixel of the output
    n = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    area = out_high * out_wide
    image, row, column = m // area, (m % area) // out_wide, m % out_wide
    x += job * (pixels // area) * high * wide * CI
    w += job * 9 * CI * CO
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, 9 * CI, BK):
        k = start + tl.arange(0, BK)
        tap, channel = k // CI, k % CI
        h = row[:, None] + (tap // 3)[None, :] - pad
        v = column[:, None] + (tap % 3)[None, :] - pad
        inside = (h >= 0) & (h < high) & (v >= 0) & (v < wide) & (m < pixels)[:, None]
        place = ((image[:, None] * high + h) * wide + v) * CI + channel[None, :]
        some = tl.load(x + place, mask=inside, other=0.0)
        weights = tl.load(w + k[:, None] * CO + n[None, :])
        total = tl.dot(some, weights, total, input_precision=PRECISION)
    place = job * pixels * CO + m[:, None] * CO + n[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(m < pixels)[:, None])


@triton.jit
def _weight_kernel(
    x, grad, out, pixels, high, wide, out_high, out_wide, pad,
    STEPS: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    BR: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile [BR taps x inputs, BN outputs] of one client, over one part of its pixels."""
    job = tl.program_id(2).to(tl.int64)
    part = tl.program_id(1)
    columns: tl.constexpr = CO // BN
    r = (tl.program_id(0) // columns) * BR + tl.arange(0, BR)
    n = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    tap, channel, real = r // CI, r % CI, r < 9 * CI
    area = out_high * out_wide
    x += job * (pixels // area) * high * wide * CI
    grad += job * pixels * CO
    total = tl.zeros((BR, BN), dtype=tl.float32)
    for step in range(0, STEPS):
        m = (part * STEPS + step) * BM + tl.arange(0, BM)
        h = ((m % area) // out_wide)[:, None] + (tap // 3)[None, :] - pad
        v = (m % out_wide)[:, None] + (tap % 3)[None, :] - pad
        inside = (h >= 0) & (h < high) & (v >= 0) & (v < wide) & (m < pixels)[:, None]
        place = (((m // area)[:, None] * high + h) * wide + v) * CI + channel[None, :]
        some = tl.load(x + place, mask=inside & real[None, :], other=0.0)
        rows = tl.load(grad + m[:, None] * CO + n[None, :], mask=(m < pixels)[:, None], other=0.0)
        total = tl.dot(tl.trans(some), rows, total, input_precision=PRECISION)
    out += (job * tl.num_programs(1) + part) * 9 * CI * CO
    tl.store(out + r[:, None] * CO + n[None, :], total, mask=real[:, None])


def _precision(x: Tensor) -> str:
    exact = x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    return "ieee" if exact else "tf32"


@torch.library.custom_op("fedglimpse::conv3x3", mutates_args=())
def conv3x3(x: Tensor, weight: Tensor, pad: int) -> Tensor:
    """Convolve every client's images with its own weights.

    Args:
        x: images, channels last.  # [J, B, H, W, CI]
        weight: taps in row-major order.  # [J, 9, CI, CO]
        pad: zeros around an image, 0 to 2.

    Returns:
        Images.  # [J, B, H + 2 pad - 2, W + 2 pad - 2, CO]
    """
    jobs, batch, high, wide, inputs = x.shape
    outputs = weight.shape[-1]
    out = x.new_empty(jobs, batch, high + 2 * pad - 2, wide + 2 * pad - 2, outputs)
    pixels = batch * out.shape[2] * out.shape[3]
    rows, columns = 128, min(outputs, 128)
    deep = min(inputs, 64)  # divides 9 * inputs
    grid = (triton.cdiv(pixels, rows) * (outputs // columns), jobs)
    _forward_kernel[grid](
        x, weight, out, pixels, high, wide, out.shape[2], out.shape[3], pad,
        inputs, outputs, rows, columns, deep, _precision(x),
        num_warps=4, num_stages=3 if deep == 64 else 4,
    )  # fmt: skip
    return out


@torch.library.custom_op("fedglimpse::conv3x3_weight_grad", mutates_args=())
def conv3x3_weight_grad(x: Tensor, grad: Tensor, pad: int) -> Tensor:
    """Return the gradient of the weights `[J, 9, CI, CO]`, in float32."""
    jobs, batch, high, wide, inputs = x.shape
    out_high, out_wide, outputs = grad.shape[2:]
    pixels = batch * out_high * out_wide
    parts = 4 if pixels >= _SPLIT_PIXELS else 1
    steps = triton.cdiv(pixels, parts * _WEIGHT_PIXELS)
    rows = 2 * _WEIGHT_ROWS if inputs * outputs >= 128 * 128 else _WEIGHT_ROWS
    columns = min(outputs, 128)
    out = torch.empty(jobs, parts, TAPS, inputs, outputs, device=x.device)
    grid = (triton.cdiv(TAPS * inputs, rows) * (outputs // columns), parts, jobs)
    _weight_kernel[grid](
        x, grad, out, pixels, high, wide, out_high, out_wide, pad,
        steps, inputs, outputs, rows, columns, _WEIGHT_PIXELS, _precision(x),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return out.sum(1)


@conv3x3.register_fake
def _(x: Tensor, weight: Tensor, pad: int) -> Tensor:
    jobs, batch, high, wide, _ = x.shape
    return x.new_empty(jobs, batch, high + 2 * pad - 2, wide + 2 * pad - 2, weight.shape[-1])


@conv3x3_weight_grad.register_fake
def _(x: Tensor, grad: Tensor, pad: int) -> Tensor:
    return x.new_empty(x.shape[0], TAPS, x.shape[-1], grad.shape[-1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.pad = inputs[2]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    grad = grad.contiguous()
    turned = weight.flip(1).transpose(2, 3).contiguous()  # [J, 9, CO, CI]
    of_weight = conv3x3_weight_grad(x, grad, ctx.pad).to(weight.dtype)
    return conv3x3(grad, turned, 2 - ctx.pad), of_weight, None


conv3x3.register_autograd(_backward, setup_context=_keep)
