"""The first convolution of J clients with all that follows it, without ever storing its result.

    y = pool(BatchNorm(ReLU(conv3x3(x) + bias)))

Images have 1 to 4 channels and the convolution has 16 to 128: its result is many times larger than
its input. So every kernel here computes it again, in registers, wherever it is needed:

    forward   statistics, then y: reads x twice, writes y
    backward  sums, then weights: reads x and the gradient twice, writes next to nothing

Work goes by quads, the 2x2 squares of outputs. The four corners of a quad see the same 4x4 pixels
of x, so these are loaded once and multiplied with four sets of weights, each with 9 of its 16 taps
filled. Sums are in float32, by parts, and in a fixed order. `first_layer_kernels.py` has the
kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from fedglimpse.simulation.cuda.first_layer_kernels import (
    gradient_sums_kernel,
    moments_kernel,
    result_kernel,
    weight_gradients_kernel,
)
from fedglimpse.simulation.cuda.operator_names import versioned_name


class QuadTile(NamedTuple):
    """How a kernel divides its work."""

    quads: int  # of a program at a time
    programs: int  # of a client, a power of two
    warps: int  # of a program


TILE = QuadTile(quads=64, programs=16, warps=4)

# Images of one channel make shallow products: quads and warps by kernel, where others are faster.
_GREY_TILES = {
    "moments": TILE._replace(quads=16, warps=1),
    "result": TILE._replace(quads=32, warps=2),
    "weight_gradients": TILE._replace(quads=32, warps=4),
}


def supported(x: Tensor, outputs: int, pad: int) -> bool:
    """True where the kernels take such a layer: few inputs, even-sided outputs, no gradient of x.

    In bf16 only: with TF32 they are less exact than the general path, which rounds its inputs.

    Args:
        x: images, channels last.  # [J, B, H, W, CI]
        outputs: channels; powers of two from 16 to 128.
        pad: zeros around an image.
    """
    if x.dtype != torch.bfloat16 or x.requires_grad:
        return False
    height, width, inputs = x.shape[2:]
    is_even = height % 2 == 0 and width % 2 == 0 and height + 2 * pad >= 4
    return inputs <= 4 and outputs in (16, 32, 64, 128) and is_even


def first_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    counts: Tensor,
    eps: float,
    pad: int,
    pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:
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
    params = [tensor.contiguous() for tensor in (weight, bias, gamma, beta, counts)]
    return padded_layer(padded, *params, eps, pool)


def _tile(kernel: str, x: Tensor) -> QuadTile:
    """Return a kernel's tile for images `[J, B, H, W, CI]`."""
    tile = _GREY_TILES.get(kernel, TILE) if x.shape[-1] == 1 else TILE
    if _dot_precision(x) == "ieee":  # exact products need more registers
        return tile._replace(quads=16, warps=8)
    return tile


def _dot_precision(x: Tensor) -> str:
    """Return how Triton multiplies float32; bf16 is not affected."""
    is_exact = x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    return "ieee" if is_exact else "tf32"


def _sizes(x: Tensor, outputs: int, tile: QuadTile) -> tuple[int | str, ...]:
    """Return the sizes that all kernels take, in their order, and the precision."""
    batch, height, width, inputs = x.shape[1:]
    across = (width - 2) // 2  # quads of a row
    per_image = (height - 2) // 2 * across
    num_quads = batch * per_image
    steps = triton.cdiv(num_quads, tile.programs * tile.quads)
    depth = {1: 16, 2: 32, 3: 64, 4: 64}[inputs]  # 16 pixels x inputs, to a power of two
    images = (num_quads, per_image, across)
    return *images, steps, inputs, outputs, depth, tile.quads, _dot_precision(x)


@torch.library.custom_op(versioned_name("first_layer"), mutates_args=())
def padded_layer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    counts: Tensor,
    eps: float,
    pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`first_layer` of images that have their zeros around them; all tensors contiguous."""
    jobs, outputs = weight.shape[:2]
    tile = _tile("moments", x)
    partials = tile.programs
    sums = torch.empty(jobs, partials, 2, outputs, device=x.device)
    moments_kernel[(partials, jobs)](
        x, weight, bias, counts, sums, *_sizes(x, outputs, tile), num_warps=tile.warps
    )  # fmt: skip
    y = _empty_result(x, outputs, pool)
    mean = torch.empty(jobs, outputs, device=x.device)
    var = torch.empty_like(mean)
    tile = _tile("result", x)
    result_kernel[(tile.programs, jobs)](
        x, weight, bias, gamma, beta, counts, sums, mean, var, y, eps,
        *_sizes(x, outputs, tile), partials, pool, num_warps=tile.warps,
    )  # fmt: skip
    return y, mean, var


def _empty_result(x: Tensor, outputs: int, pool: bool) -> Tensor:
    """Return memory for y `[J, B, H', W', CO]`."""
    jobs, batch, height, width, _ = x.shape
    shrink = 2 if pool else 1
    return x.new_empty(jobs, batch, (height - 2) // shrink, (width - 2) // shrink, outputs)


@torch.library.custom_op(versioned_name("first_layer_back"), mutates_args=())
def padded_layer_back(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    counts: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return partial sums of the gradients of all parameters.

    Returns:
        Of beta and gamma `[J, P, 2, CO]`, of the bias `[J, Q, CO]`, and of the weights of each
        corner `[J, Q, 2, 2, CI, 4, 4, CO]`.
    """
    jobs, outputs = weight.shape[:2]
    inputs = (x, weight, bias, gamma, counts, mean, var, grad)
    tile = _tile("gradient_sums", x)
    partials = tile.programs
    sums = torch.empty(jobs, partials, 2, outputs, device=x.device)
    gradient_sums_kernel[(partials, jobs)](
        *inputs, sums, eps, *_sizes(x, outputs, tile), pool, num_warps=tile.warps
    )  # fmt: skip
    tile = _tile("weight_gradients", x)
    grad_bias = torch.empty(jobs, tile.programs, outputs, device=x.device)
    grad_weight = torch.empty(_shape_by_corner(weight, tile.programs), device=x.device)
    weight_gradients_kernel[(tile.programs, jobs)](
        *inputs, sums, grad_bias, grad_weight, eps,
        *_sizes(x, outputs, tile), partials, pool, num_warps=tile.warps,
    )  # fmt: skip
    return sums, grad_bias, grad_weight


def _shape_by_corner(weight: Tensor, partials: int) -> tuple[int, ...]:
    """Return the shape of the weight gradients of each corner."""
    jobs, outputs, inputs = weight.shape[:3]
    return (jobs, partials, 2, 2, inputs, 4, 4, outputs)


@padded_layer.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    counts: Tensor,
    eps: float,
    pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    jobs = x.shape[0]  # `len` would fix it for compiled code
    outputs = weight.shape[1]
    mean = x.new_empty(jobs, outputs, dtype=torch.float32)
    return _empty_result(x, outputs, pool), mean, torch.empty_like(mean)


@padded_layer_back.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    counts: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    jobs, outputs = weight.shape[:2]
    sums = mean.new_empty(jobs, TILE.programs, 2, outputs)
    grad_bias = mean.new_empty(jobs, TILE.programs, outputs)
    return sums, grad_bias, mean.new_empty(_shape_by_corner(weight, TILE.programs))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, gamma, _, counts, ctx.eps, ctx.pool = inputs
    _, mean, var = output
    ctx.save_for_backward(x, weight, bias, gamma, counts, mean, var)
    ctx.mark_non_differentiable(mean, var)


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    sums, grad_bias, by_corner = padded_layer_back(
        grad.contiguous(), *ctx.saved_tensors, ctx.eps, ctx.pool
    )
    grad_beta, grad_gamma = sums.sum(1).unbind(1)
    by_corner = by_corner.sum(1)  # [J, 2, 2, CI, 4, 4, CO]
    grad_weight = by_corner[:, 0, 0, :, :3, :3]  # [J, CI, 3, 3, CO]
    for down, right in ((0, 1), (1, 0), (1, 1)):  # where a corner's taps begin in its 4x4 places
        taps = by_corner[:, down, right, :, down : down + 3, right : right + 3]
        grad_weight = grad_weight + taps
    grad_weight = grad_weight.permute(0, 4, 1, 2, 3).contiguous()
    return None, grad_weight, grad_bias.sum(1), grad_gamma, grad_beta, None, None, None


padded_layer.register_autograd(_backward, setup_context=_save)
