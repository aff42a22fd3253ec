"""The first convolution of J clients with all that follows it, without ever storing its result.

    y = pool(BatchNorm(ReLU(conv3x3(x) + bias)))

Images have 1 to 4 channels and the convolution has 16 to 128: its result is many times larger than
its input. So every kernel here computes it again, in registers, wherever it is needed:

    forward   statistics, then y: reads x twice, writes y
    backward  sums, then weights: reads x and the gradient twice, writes next to nothing

Work goes by quads, the 2x2 squares of outputs. The four corners of a quad see the same 4x4 pixels
of x, so these are loaded once and multiplied with four sets of weights, each with 9 of its 16 taps
filled. Sums are in float32, by parts, and in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from fedglimpse.simulation.cuda.first_layer_kernels import (
    moments_kernel,
    result_kernel,
    sums_kernel,
    weights_kernel,
)
from fedglimpse.simulation.cuda.operators import named


class QuadTile(NamedTuple):
    """How a kernel divides its work."""

    quads: int  # of a program at a time
    parts: int  # programs of a client, a power of two
    warps: int  # of a program


TILES = {
    "moments": QuadTile(64, 16, 4),
    "result": QuadTile(64, 16, 4),
    "sums": QuadTile(64, 16, 4),
    "weights": QuadTile(64, 16, 4),
}
GREY = {"moments": (16, 1), "result": (32, 2), "weights": (32, 4)}  # quads, warps for one channel


def supported(x: Tensor, outputs: int, pad: int) -> bool:
    """True where the kernels take such a layer: few inputs, even-sided outputs, no gradient of x.

    In bf16 only: with TF32 they are less exact than the general path, which rounds its inputs.

    Args:
        x: images, channels last.  # [J, B, H, W, CI]
        outputs: channels; powers of two from 16 to 128.
        pad: zeros around an image.
    """
    even = x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0 and x.shape[2] + 2 * pad >= 4
    few = x.shape[4] <= 4 and x.dtype == torch.bfloat16
    return few and outputs in (16, 32, 64, 128) and even and not x.requires_grad


def first_layer(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, counts: Tensor,
    eps: float, pad: int, pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return pool(BatchNorm(ReLU(conv3x3(x) + bias))) with the batch's own mean and variance.

    Args:
        x: images, channels last, in the type of the activations.  # [J, B, H, W, CI]
        weight: float32, as torch keeps it.  # [J, CO, CI, 3, 3]
        bias: of the convolution, float32.  # [J, CO]
        gamma: the norm's weight, float32.  # [J, CO]
        beta: the norm's bias, float32.  # [J, CO]
        counts: real images of each client; the rest is padding.  # [J] int64
        eps: of the norm.
        pad: zeros around an image.
        pool: 2x2 max-pooling.

    Returns:
        y `[J, B, H', W', CO]`, mean `[J, CO]` and biased variance `[J, CO]`.
    """
    padded = F.pad(x, (0, 0, pad, pad, pad, pad)).contiguous()
    tensors = [t.contiguous() for t in (weight, bias, gamma, beta, counts)]
    return padded_layer(padded, *tensors, eps, pool)


def _work(x: Tensor, outputs: int, tile: QuadTile) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes that all kernels take: three of the images, five of a tile."""
    batch, high, wide, inputs = x.shape[1:]
    across = (wide - 2) // 2
    per_image = (high - 2) // 2 * across
    steps = triton.cdiv(batch * per_image, tile.parts * tile.quads)
    deep = {1: 16, 2: 32, 3: 64, 4: 64}[inputs]  # 16 inputs of a quad, to a power of two
    return (batch * per_image, per_image, across), (steps, inputs, outputs, deep, tile.quads)


def _precision(x: Tensor) -> str:
    exact = x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    return "ieee" if exact else "tf32"


def _tile(kernel: str, x: Tensor) -> QuadTile:
    """Return a kernel's tile; a small one where exact products need more registers."""
    tile = TILES[kernel]
    if x.shape[-1] == 1 and kernel in GREY:
        quads, warps = GREY[kernel]
        tile = tile._replace(quads=quads, warps=warps)
    return tile._replace(quads=16, warps=8) if _precision(x) == "ieee" else tile


@torch.library.custom_op(named("first_layer"), mutates_args=())
def padded_layer(
    x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, counts: Tensor,
    eps: float, pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`first_layer` of images that have their zeros around them; all tensors contiguous."""
    jobs, batch, high, wide, _ = x.shape
    outputs = weight.shape[1]
    tile = _tile("moments", x)
    parts = tile.parts
    sums = torch.empty(jobs, parts, 2, outputs, device=x.device)
    images, tiles = _work(x, outputs, tile)
    moments_kernel[(parts, jobs)](
        x, weight, bias, counts, sums, *images, *tiles, _precision(x), num_warps=tile.warps
    )  # fmt: skip
    shrink = 2 if pool else 1
    y = x.new_empty(jobs, batch, (high - 2) // shrink, (wide - 2) // shrink, outputs)
    mean = torch.empty(jobs, outputs, device=x.device)
    var = torch.empty_like(mean)
    tile = _tile("result", x)
    images, tiles = _work(x, outputs, tile)
    result_kernel[(tile.parts, jobs)](
        x, weight, bias, gamma, beta, counts, sums, mean, var, y, eps, *images, *tiles,
        _precision(x), parts, pool, num_warps=tile.warps,
    )  # fmt: skip
    return y, mean, var


@torch.library.custom_op(named("first_layer_back"), mutates_args=())
def padded_layer_back(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, counts: Tensor,
    mean: Tensor, var: Tensor, eps: float, pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return, by parts still to be summed, the gradients of all parameters.

    Returns:
        Of beta and gamma `[J, P, 2, CO]`, of the bias `[J, Q, CO]`, and of the weights of each
        corner `[J, Q, 2, 2, CI, 4, 4, CO]`.
    """
    jobs, outputs = weight.shape[:2]
    tile = _tile("sums", x)
    parts = tile.parts
    sums = torch.empty(jobs, parts, 2, outputs, device=x.device)
    images, tiles = _work(x, outputs, tile)
    sums_kernel[(parts, jobs)](
        x, weight, bias, gamma, counts, mean, var, grad, sums, eps, *images, *tiles,
        _precision(x), pool, num_warps=tile.warps,
    )  # fmt: skip
    tile = _tile("weights", x)
    of_bias = torch.empty(jobs, tile.parts, outputs, device=x.device)
    of_weight = torch.empty(_by_corner(weight, tile.parts), device=x.device)
    images, tiles = _work(x, outputs, tile)
    weights_kernel[(tile.parts, jobs)](
        x, weight, bias, gamma, counts, mean, var, grad, sums, of_bias, of_weight, eps,
        *images, *tiles, _precision(x), parts, pool, num_warps=tile.warps,
    )  # fmt: skip
    return sums, of_bias, of_weight


def _by_corner(weight: Tensor, parts: int) -> tuple[int, ...]:
    jobs, outputs, inputs = weight.shape[:3]
    return (jobs, parts, 2, 2, inputs, 4, 4, outputs)


@padded_layer.register_fake
def _(x, weight, bias, gamma, beta, counts, eps, pool):
    jobs, batch, high, wide, _ = x.shape
    shrink = 2 if pool else 1
    y = x.new_empty(jobs, batch, (high - 2) // shrink, (wide - 2) // shrink, weight.shape[1])
    mean = x.new_empty(jobs, weight.shape[1], dtype=torch.float32)
    return y, mean, torch.empty_like(mean)


@padded_layer_back.register_fake
def _(grad, x, weight, bias, gamma, counts, mean, var, eps, pool):
    jobs, outputs = weight.shape[:2]
    sums = mean.new_empty(jobs, TILES["sums"].parts, 2, outputs)
    parts = TILES["weights"].parts
    return (
        sums,
        mean.new_empty(jobs, parts, outputs),
        mean.new_empty(_by_corner(weight, parts)),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, gamma, _, counts, ctx.eps, ctx.pool = inputs
    ctx.save_for_backward(x, weight, bias, gamma, counts, output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    sums, of_bias, corners = padded_layer_back(
        grad.contiguous(), *ctx.saved_tensors, ctx.eps, ctx.pool
    )
    of_beta, of_gamma = sums.sum(1).unbind(1)
    corners = corners.sum(1)  # [J, 2, 2, CI, 4, 4, CO]; a corner's taps begin at its own place
    of_weight = sum(
        corners[:, down, right, :, down : down + 3, right : right + 3]
        for down in (0, 1)
        for right in (0, 1)
    )
    of_weight = of_weight.permute(0, 4, 1, 2, 3).contiguous()
    return None, of_weight, of_bias.sum(1), of_gamma, of_beta, None, None, None


padded_layer.register_autograd(_backward, setup_context=_keep)
