"""3x3 convolutions of J clients, each with its own weights, as a few Triton kernels.

cuDNN runs such a stack as one grouped convolution and leaves most of the tensor cores idle when
groups are narrow. Here every client is an implicit matrix product on `[J, B, H, W, C]`:

    forward    rows are pixels, columns output channels, the sum runs over 9 taps x input channels;
               narrow layers go line by line, see `rolling.py`
    input grad the same kernels, with flipped and transposed weights
    weight grad rows are kernel rows x input channels, columns output channels, the sum runs over
                pixels; the three kernel columns share what they read

Sums are in float32 and in a fixed order: results do not change from run to run.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fedglimpse.simulation.cuda.conv_kernels import forward_kernel, weight_kernel
from fedglimpse.simulation.cuda.operators import named
from fedglimpse.simulation.cuda.rolling import rolling_kernel

TAPS = 9
ROOMY = ((8, 0), (9, 0), (10, 0), (10, 3))  # compute capabilities with shared memory for all tiles
_PART_PIXELS = 2048  # of a client that one program of the weight gradient sums, at least


class ConvTile(NamedTuple):
    """What a program of a kernel computes at a time."""

    rows: int  # of its result: pixels, or kernel rows x inputs for gradients of weights
    columns: int  # output channels
    deep: int  # terms of its sums: inputs, or pixels; 0: line by line
    warps: int = 4
    stages: int = 3  # of the pipeline that loads them


# By inputs and outputs of a layer, in bf16; the fastest of those that `benchmarks/conv_tiles.py`
# tries on an H200. Other layers, and GPUs with less shared memory, take what `_tile` and
# `_weight_tile` say.
FORWARD_TILES: dict[tuple[int, int], ConvTile] = {
    (32, 32): ConvTile(128, 32, 0, 8, 3),
    (64, 32): ConvTile(64, 32, 0, 4, 3),
    (64, 64): ConvTile(64, 64, 0, 4, 3),
}
MOMENTS_TILES: dict[tuple[int, int], ConvTile] = {
    (32, 32): ConvTile(64, 32, 0, 4, 3),
    (32, 64): ConvTile(64, 64, 0, 4, 3),
    (64, 128): ConvTile(256, 128, 64, 8, 3),
}
WEIGHT_TILES: dict[tuple[int, int], ConvTile] = {
    (32, 32): ConvTile(128, 32, 32, 4, 4),
    (32, 64): ConvTile(128, 64, 32, 4, 4),
    (64, 64): ConvTile(64, 64, 32, 4, 4),
    (64, 128): ConvTile(128, 128, 32, 8, 4),
    (128, 128): ConvTile(128, 128, 64, 8, 3),
}


def channels_of_kernel(channels: int) -> int:
    """Return how many channels the kernels need for a layer with so many: a power of two."""
    return max(triton.next_power_of_2(channels), 16)


def _exact(x: Tensor) -> bool:
    """True where products must be of full float32."""
    return x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32


def _tile(x: Tensor, outputs: int, pad: int, moments: bool) -> ConvTile:
    """Return the tile of a forward kernel for images `[J, B, H, W, CI]`."""
    wide, inputs = x.shape[3:]
    half, table = x.dtype == torch.bfloat16, MOMENTS_TILES if moments else FORWARD_TILES
    tile = table.get((inputs, outputs)) if half and _roomy(x.device) else None
    if tile and (tile.deep or (pad == 1 and tile.rows % wide == 0)):
        return tile
    columns = min(outputs, 64 if _exact(x) else 128)
    return ConvTile(rows=128, columns=columns, deep=min(inputs, 64 if half else 32))


def _weight_tile(x: Tensor, outputs: int) -> ConvTile:
    """Return the tile of the weight kernel for images `[J, B, H, W, CI]`."""
    columns = min(outputs, 64)
    if _exact(x):  # these products need more registers
        return ConvTile(rows=64, columns=min(outputs, 32), deep=32, stages=1)
    if x.dtype != torch.bfloat16:
        return ConvTile(rows=64, columns=columns, deep=64, stages=1)
    tile = WEIGHT_TILES.get((x.shape[-1], outputs)) if _roomy(x.device) else None
    return tile or ConvTile(rows=64, columns=columns, deep=64)


@cache
def _roomy(device: torch.device) -> bool:
    """True where the tiles of the tables fit into shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ROOMY


@torch.library.custom_op(named("conv3x3"), mutates_args=())
def conv3x3(x: Tensor, weight: Tensor, counts: Tensor | None, pad: int) -> Tensor:
    """Convolve every client's images with its own weights.

    Args:
        x: images, channels last.  # [J, B, H, W, CI]
        weight: taps in row-major order.  # [J, 9, CO, CI]
        counts: real images of each client, the first ones; None: all are real.  # [J] int64
        pad: zeros around an image, 0 to 2.

    Returns:
        Images, zeros for those that are not real.  # [J, B, H + 2 pad - 2, W + 2 pad - 2, CO]
    """
    out = _room(x, weight, pad)
    _convolve(x, weight, out, counts, pad, None)
    return out


@torch.library.custom_op(named("conv3x3_moments"), mutates_args=())
def conv3x3_moments(
    x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor, pad: int
) -> tuple[Tensor, Tensor]:
    """Convolve, and sum what BatchNorm asks for while the result is still in registers.

    Args:
        x: as in `conv3x3`.
        weight: as there.
        bias: float32, added by what follows.  # [J, CO]
        counts: as there.  # [J] int64
        pad: as there.

    Returns:
        What `conv3x3` returns, and by parts still to be summed those of r and r^2 over real images,
        r = ReLU(result + bias).  # [J, P, 2, CO]
    """
    out = _room(x, weight, pad)
    sums = torch.empty(_sums_shape(x, out, pad), device=x.device)
    _convolve(x, weight, out, counts, pad, (bias.contiguous(), sums))
    return out, sums


def _room(x: Tensor, weight: Tensor, pad: int) -> Tensor:
    """Return room for images `[J, B, H', W', CO]`."""
    jobs, batch, high, wide, _ = x.shape
    return x.new_empty(jobs, batch, high + 2 * pad - 2, wide + 2 * pad - 2, weight.shape[2])


def _sums_shape(x: Tensor, out: Tensor, pad: int) -> tuple[int, int, int, int]:
    """Return the shape of the sums that the programs of a convolution leave behind."""
    outputs = out.shape[4]
    return x.shape[0], _programs(x, out, _tile(x, outputs, pad, True)), 2, outputs


def _programs(x: Tensor, out: Tensor, tile: ConvTile) -> int:
    """Return how many programs share a client's pixels."""
    if not tile.deep:
        return triton.cdiv(x.shape[1], tile.rows // x.shape[3])
    return triton.cdiv(out.shape[1] * out.shape[2] * out.shape[3], tile.rows)


def _convolve(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    counts: Tensor | None,
    pad: int,
    moments: tuple[Tensor, Tensor] | None,
) -> None:
    """Write a convolution to `out`; `moments`: the bias, and where the sums go."""
    jobs, batch, high, wide, inputs = x.shape
    outputs = weight.shape[2]
    tile = _tile(x, outputs, pad, moments is not None)
    grid = (_programs(x, out, tile) * (outputs // tile.columns), jobs)
    pipe = {"num_warps": tile.warps, "num_stages": tile.stages}
    bias, sums = moments or (out, out)  # what is not asked for is not touched
    flags = (counts is not None, moments is not None)
    given = (bias, out if counts is None else counts.contiguous(), sums)
    if not tile.deep:
        rolling_kernel[grid](
            x, weight, out, batch, *given, high, wide, inputs, outputs,
            tile.rows, tile.columns, *flags, **pipe,
        )  # fmt: skip
        return
    pixels = batch * out.shape[2] * out.shape[3]
    forward_kernel[grid](
        x, weight, out, pixels, *given, high, wide, pad, inputs, outputs,
        tile.rows, tile.columns, tile.deep, "ieee" if _exact(x) else "tf32", *flags, **pipe,
    )  # fmt: skip


@torch.library.custom_op(named("conv3x3_weight_grad"), mutates_args=())
def conv3x3_weight_grad(x: Tensor, grad: Tensor, counts: Tensor | None, pad: int) -> Tensor:
    """Return the gradient of the weights in parts still to be summed `[J, P, 9, CI, CO]`, float32.

    Where float32 may be rounded to TF32, products are of two bf16 each instead: tensor cores take
    TF32 by rows only, and here sums run over pixels. They are more exact than TF32. `counts`: as in
    `conv3x3`; other images are not read.
    """
    jobs, batch, high, wide, inputs = x.shape
    out_high, outputs = grad.shape[2], grad.shape[4]
    lines = batch * out_high
    tile = _weight_tile(x, outputs)
    precision = "ieee" if _exact(x) else "tf32" if x.dtype == torch.bfloat16 else "split"
    parts = _parts_of(lines * wide)
    steps = triton.cdiv(lines * wide, parts * tile.deep)
    out = torch.empty(jobs, parts, TAPS, inputs, outputs, device=x.device)
    grid = (triton.cdiv(3 * inputs, tile.rows) * (outputs // tile.columns), parts, jobs)
    weight_kernel[grid](
        x, grad, out, out if counts is None else counts.contiguous(), lines, steps,
        high, wide, pad, inputs, outputs,
        tile.rows, tile.columns, tile.deep, precision, counts is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _parts_of(pixels: int) -> int:
    """Return by how many programs a client's weight gradient is summed."""
    return min(max(pixels // _PART_PIXELS, 1), 8)


@conv3x3.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor | None, pad: int) -> Tensor:
    return _room(x, weight, pad)


@conv3x3_moments.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    out = _room(x, weight, pad)
    return out, x.new_empty(_sums_shape(x, out, pad), dtype=torch.float32)


@conv3x3_weight_grad.register_fake
def _(x: Tensor, grad: Tensor, counts: Tensor | None, pad: int) -> Tensor:
    parts = _parts_of(x.shape[1] * grad.shape[2] * x.shape[3])
    shape = (x.shape[0], parts, TAPS, x.shape[-1], grad.shape[-1])
    return x.new_empty(shape, dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, *_, counts, ctx.pad = inputs
    ctx.counted, ctx.others = counts is not None, len(inputs) - 2
    ctx.save_for_backward(x, weight, *([counts] if ctx.counted else []))
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors[:2]
    counts = ctx.saved_tensors[2] if ctx.counted else None
    grad = grad.contiguous()
    turned = weight.flip(1).transpose(2, 3).contiguous()  # [J, 9, CI, CO]
    of_weight = conv3x3_weight_grad(x, grad, counts, ctx.pad).sum(1).transpose(2, 3)
    of_x = conv3x3(grad, turned, counts, 2 - ctx.pad) if ctx.needs_input_grad[0] else None
    return of_x, of_weight.to(weight.dtype), *[None] * ctx.others


conv3x3.register_autograd(_backward, setup_context=_keep)
conv3x3_moments.register_autograd(_backward, setup_context=_keep)
