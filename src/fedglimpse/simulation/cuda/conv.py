"""3x3 convolutions of J clients, each with its own weights, as a few Triton kernels.

cuDNN runs such a stack as one grouped convolution and leaves most of the tensor cores idle when
groups are narrow. Here every client is an implicit matrix product on `[J, B, H, W, C]`:

    forward          rows are pixels, columns output channels, and sums run over 9 taps x input
                     channels (`tile_kernel`); narrow layers go line by line (`line_kernel`)
    input gradient   the same kernels, with flipped and transposed weights
    weight gradient  rows are kernel lines x input channels, columns output channels, and sums run
                     over pixels (`weight_gradient_kernel`); the three kernel columns share what
                     they read

`conv_kernels.py` has the kernels. Sums are in float32 and in a fixed order: results do not change
from run to run.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fedglimpse.simulation.cuda.conv_kernels import line_kernel, tile_kernel, weight_gradient_kernel
from fedglimpse.simulation.cuda.operator_names import versioned_name

NUM_TAPS = 9
_PIXELS_PER_PARTIAL = 2048  # that one program of the weight gradient sums, at least
_MAX_PARTIALS = 8  # programs that share the weight gradient of a client

# Compute capabilities of GPUs whose shared memory holds every tile of the tables below.
_WITH_LARGE_SHARED_MEMORY = ((8, 0), (9, 0), (10, 0), (10, 3))


class ConvTile(NamedTuple):
    """What a program of a kernel computes at a time."""

    rows: int  # of its result: pixels, or kernel lines x inputs for gradients of weights
    columns: int  # output channels
    depth: int  # terms of its sums at a time: inputs, or pixels; 0: line by line
    warps: int = 4
    stages: int = 3  # of the pipeline that loads them

    @property
    def is_line_by_line(self) -> bool:
        """True where `line_kernel` takes the layer, not `tile_kernel`."""
        return self.depth == 0


# By inputs and outputs of a layer, in bf16; the fastest of those that `benchmarks/conv_tiles.py`
# tries on an H200. Other layers, and GPUs with less shared memory, take what `_forward_tile` and
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


def _needs_full_float32(x: Tensor) -> bool:
    """True where products must not be rounded to TF32."""
    return x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32


def _dot_precision(x: Tensor) -> str:
    """Return how Triton multiplies float32; bf16 is not affected."""
    return "ieee" if _needs_full_float32(x) else "tf32"


def _forward_tile(x: Tensor, outputs: int, pad: int, moments: bool) -> ConvTile:
    """Return the tile of a forward kernel for images `[J, B, H, W, CI]`."""
    width, inputs = x.shape[3:]
    is_bf16 = x.dtype == torch.bfloat16
    if is_bf16 and _has_large_shared_memory(x.device):
        table = MOMENTS_TILES if moments else FORWARD_TILES
        tile = table.get((inputs, outputs))
        if tile and not tile.is_line_by_line:
            return tile
        if tile and pad == 1 and tile.rows % width == 0:  # what `line_kernel` can do
            return tile
    most_columns = 64 if _needs_full_float32(x) else 128
    most_depth = 64 if is_bf16 else 32
    return ConvTile(
        rows=128,
        columns=min(outputs, most_columns),
        depth=min(inputs, most_depth),
    )


def _weight_tile(x: Tensor, outputs: int) -> ConvTile:
    """Return the tile of the weight kernel for images `[J, B, H, W, CI]`."""
    columns = min(outputs, 64)
    if _needs_full_float32(x):  # these products need more registers
        return ConvTile(rows=64, columns=min(outputs, 32), depth=32, stages=1)
    if x.dtype != torch.bfloat16:
        return ConvTile(rows=64, columns=columns, depth=64, stages=1)
    measured = WEIGHT_TILES.get((x.shape[-1], outputs))
    if measured and _has_large_shared_memory(x.device):
        return measured
    return ConvTile(rows=64, columns=columns, depth=64)


@cache
def _has_large_shared_memory(device: torch.device) -> bool:
    """True where the tiles of the tables fit into shared memory."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) in _WITH_LARGE_SHARED_MEMORY


@torch.library.custom_op(versioned_name("conv3x3"), mutates_args=())
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
    out = _empty_result(x, weight, pad)
    tile = _forward_tile(x, weight.shape[2], pad, moments=False)
    _launch_forward(tile, x, weight, out, counts, pad, None, None)
    return out


@torch.library.custom_op(versioned_name("conv3x3_moments"), mutates_args=())
def conv3x3_moments(
    x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor, pad: int
) -> tuple[Tensor, Tensor]:
    """Convolve, and sum what BatchNorm asks for while the result is still in registers.

    Args:
        x: as in `conv3x3`.
        weight: as in `conv3x3`.
        bias: float32, added by what follows, not here.  # [J, CO]
        counts: as in `conv3x3`.  # [J] int64
        pad: as in `conv3x3`.

    Returns:
        What `conv3x3` returns, and partial sums of r and r^2 over real images,
        r = ReLU(result + bias).  # [J, P, 2, CO]
    """
    out = _empty_result(x, weight, pad)
    shape = _sums_shape(x, out, pad)
    sums = torch.empty(shape, device=x.device)
    tile = _forward_tile(x, weight.shape[2], pad, moments=True)
    _launch_forward(tile, x, weight, out, counts, pad, bias.contiguous(), sums)
    return out, sums


def _empty_result(x: Tensor, weight: Tensor, pad: int) -> Tensor:
    """Return memory for images `[J, B, H', W', CO]`."""
    jobs, batch, height, width, _ = x.shape
    outputs = weight.shape[2]
    out_height = height + 2 * pad - 2
    out_width = width + 2 * pad - 2
    return x.new_empty(jobs, batch, out_height, out_width, outputs)


def _sums_shape(x: Tensor, out: Tensor, pad: int) -> tuple[int, int, int, int]:
    """Return the shape of the partial sums that the programs of a convolution leave."""
    outputs = out.shape[4]
    tile = _forward_tile(x, outputs, pad, moments=True)
    programs = _programs_per_column(x, out, tile)
    return x.shape[0], programs, 2, outputs


def _programs_per_column(x: Tensor, out: Tensor, tile: ConvTile) -> int:
    """Return how many programs share a client's pixels."""
    if tile.is_line_by_line:
        images_per_program = tile.rows // x.shape[3]
        return triton.cdiv(x.shape[1], images_per_program)
    batch, height, width = out.shape[1:4]
    num_pixels = batch * height * width
    return triton.cdiv(num_pixels, tile.rows)


def _launch_forward(
    tile: ConvTile,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    counts: Tensor | None,
    pad: int,
    bias: Tensor | None,
    sums: Tensor | None,
) -> None:
    """Write a convolution to `out`, and moments to `sums` where there are a bias and sums."""
    jobs, batch, height, width, inputs = x.shape
    outputs = weight.shape[2]
    tiles_across = outputs // tile.columns
    grid = (_programs_per_column(x, out, tile) * tiles_across, jobs)
    # Triton takes no absent tensors; what these flags rule out is not touched.
    has_counts = counts is not None
    has_moments = sums is not None
    optional = (
        out if bias is None else bias,
        out if counts is None else counts.contiguous(),
        out if sums is None else sums,
    )
    if tile.is_line_by_line:
        line_kernel[grid](
            x, weight, out, batch, *optional,
            height, width, inputs, outputs, tile.rows, tile.columns, has_counts, has_moments,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    else:
        num_pixels = batch * out.shape[2] * out.shape[3]
        tile_kernel[grid](
            x, weight, out, num_pixels, *optional,
            height, width, pad, inputs, outputs, tile.rows, tile.columns, tile.depth,
            _dot_precision(x), has_counts, has_moments,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


@torch.library.custom_op(versioned_name("conv3x3_weight_grad"), mutates_args=())
def conv3x3_weight_grad(x: Tensor, grad: Tensor, counts: Tensor | None, pad: int) -> Tensor:
    """Return partial sums `[J, P, 9, CI, CO]` of the gradient of the weights, in float32.

    Where float32 may be rounded to TF32, products are of two bf16 each instead: tensor cores take
    TF32 by rows only, and here sums run over pixels. They are more exact than TF32. `counts`: as in
    `conv3x3`; other images are not read.
    """
    jobs, batch, height, width, inputs = x.shape
    out_height = grad.shape[2]
    outputs = grad.shape[4]
    num_lines = batch * out_height
    num_pixels = num_lines * width
    partials = _num_partials(num_pixels)
    tile = _weight_tile(x, outputs)
    steps = triton.cdiv(num_pixels, partials * tile.depth)
    can_split = x.dtype == torch.float32 and not _needs_full_float32(x)
    precision = "split" if can_split else _dot_precision(x)
    out = torch.empty(jobs, partials, NUM_TAPS, inputs, outputs, device=x.device)
    tiles_down = triton.cdiv(3 * inputs, tile.rows)
    tiles_across = outputs // tile.columns
    grid = (tiles_down * tiles_across, partials, jobs)
    weight_gradient_kernel[grid](
        x, grad, out, out if counts is None else counts.contiguous(), num_lines, steps,
        height, width, pad, inputs, outputs, tile.rows, tile.columns, tile.depth,
        precision, counts is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _num_partials(num_pixels: int) -> int:
    """Return how many programs share a client's weight gradient."""
    return min(max(num_pixels // _PIXELS_PER_PARTIAL, 1), _MAX_PARTIALS)


@conv3x3.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor | None, pad: int) -> Tensor:
    return _empty_result(x, weight, pad)


@conv3x3_moments.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    out = _empty_result(x, weight, pad)
    shape = _sums_shape(x, out, pad)
    return out, x.new_empty(shape, dtype=torch.float32)


@conv3x3_weight_grad.register_fake
def _(x: Tensor, grad: Tensor, counts: Tensor | None, pad: int) -> Tensor:
    jobs, batch, _, width, inputs = x.shape
    out_height = grad.shape[2]
    outputs = grad.shape[4]
    partials = _num_partials(batch * out_height * width)
    shape = (jobs, partials, NUM_TAPS, inputs, outputs)
    return x.new_empty(shape, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep what the gradient needs, of either operator."""
    x, weight, *_, counts, ctx.pad = inputs
    ctx.has_counts = counts is not None
    ctx.num_inputs = len(inputs)
    ctx.save_for_backward(x, weight, *([counts] if ctx.has_counts else []))
    if isinstance(output, tuple):  # of `conv3x3_moments`
        ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors[:2]
    counts = ctx.saved_tensors[2] if ctx.has_counts else None
    grad = grad.contiguous()
    partials = conv3x3_weight_grad(x, grad, counts, ctx.pad)
    grad_weight = partials.sum(1).transpose(2, 3)
    grad_x = None
    if ctx.needs_input_grad[0]:
        turned = weight.flip(1).transpose(2, 3).contiguous()  # [J, 9, CI, CO]
        grad_x = conv3x3(grad, turned, counts, 2 - ctx.pad)
    without_gradient = [None] * (ctx.num_inputs - 2)
    return grad_x, grad_weight.to(weight.dtype), *without_gradient


conv3x3.register_autograd(_backward, setup_context=_save)
conv3x3_moments.register_autograd(_backward, setup_context=_save)
