"""ReLU, BatchNorm and 2x2 max-pooling of J clients in as few passes over memory as possible.

The client models put these behind every convolution: y = pool(BatchNorm(ReLU(z + bias))). Written
layer by layer they read and write the activations a dozen times a step; here

    forward   reads z and writes y; the convolution has summed what the statistics are made of
    backward  reads z and the gradient twice (sums, then result) and writes the gradient of z

Everything between is recomputed in registers. Sums are in float32 and in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from fedglimpse.simulation.cuda.operators import named
from fedglimpse.simulation.cuda.relu_norm_kernels import (
    back_kernel,
    moments_to_affine_kernel,
    result_kernel,
    sums_kernel,
)

_PARTS = 32  # programs that share a client's pixels
_TILE = 2048  # numbers of z that a program holds at a time, and twice as many where it only writes


def _tiles(rows: int, channels: int, numbers: int) -> tuple[int, int, int]:
    """Return rows of a tile, steps of a program, and programs for a client."""
    tile = max(numbers // channels, 8)
    parts = min(_PARTS, triton.cdiv(rows, tile))
    return tile, triton.cdiv(rows, parts * tile), parts


def _back_tiles(rows_out: int, channels: int, pool: bool) -> tuple[int, int, int]:
    return _tiles(rows_out, channels, _TILE // 2 if pool else _TILE)


@torch.library.custom_op(named("relu_norm"), mutates_args=())
def relu_norm(
    z: Tensor, bias: Tensor, weight: Tensor, beta: Tensor, counts: Tensor, sums: Tensor,
    eps: float, pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return pool(BatchNorm(ReLU(z + bias))) with the batch's own statistics, mean and variance.

    Args:
        z: outputs of a convolution; even-sided where pooled.  # [J, B, H, W, C]
        bias: of that convolution.  # [J, C]
        weight: of the norm.  # [J, C]
        beta: the norm's bias.  # [J, C]
        counts: real images of each client; the rest is padding.  # [J] int64
        sums: by parts those of r and r^2, r = ReLU(z + bias), of real images.  # [J, P, 2, C]
        eps: of the norm.
        pool: 2x2 max-pooling.

    Returns:
        y `[J, B, H', W', C]`, mean `[J, C]` and biased variance `[J, C]`.
    """
    jobs, _, high, wide, channels = z.shape
    parts = sums.shape[1]
    mean, var, scale, shift = (torch.empty(jobs, channels, device=z.device) for _ in range(4))
    moments_to_affine_kernel[(jobs,)](
        sums, weight, beta, counts, mean, var, scale, shift, high * wide, eps,
        channels, parts, min(triton.next_power_of_2(parts), _PARTS),
    )  # fmt: skip
    return relu_affine(z, bias, scale, shift, counts, pool), mean, var


@torch.library.custom_op(named("relu_frozen_norm"), mutates_args=())
def relu_frozen_norm(
    z: Tensor, bias: Tensor, weight: Tensor, beta: Tensor, counts: Tensor,
    mean: Tensor, var: Tensor, eps: float, pool: bool,
) -> Tensor:  # fmt: skip
    """Return pool(BatchNorm(ReLU(z + bias))) with given statistics, `[J, C]` each.

    The other arguments and the answer are those of `relu_norm`.
    """
    scale = weight * torch.rsqrt(var + eps)
    return relu_affine(z, bias, scale, beta - mean * scale, counts, pool)


def relu_affine(
    z: Tensor, bias: Tensor, scale: Tensor, shift: Tensor, counts: Tensor, pool: bool
) -> Tensor:
    """Return pool(ReLU(z + bias) * scale + shift), zeros for padding, without a gradient.

    Args:
        z: outputs of a convolution; even-sided where pooled.  # [J, B, H, W, C]
        bias: of that convolution.  # [J, C]
        scale: float32.  # [J, C]
        shift: float32.  # [J, C]
        counts: real images of each client.  # [J] int64
        pool: 2x2 max-pooling.
    """
    jobs, batch, high, wide, channels = z.shape
    rows = batch * high * wide
    tile, rows_out = _tiles(rows, channels, 2 * _TILE)[0], rows // (4 if pool else 1)
    out = z.new_empty(jobs, batch, high // (1 + pool), wide // (1 + pool), channels)
    result_kernel[(triton.cdiv(rows_out, tile), jobs)](
        z, bias.contiguous(), scale.contiguous(), shift.contiguous(), counts, out,
        rows_out, rows, out.shape[2] * out.shape[3], wide, channels, tile, pool,
    )  # fmt: skip
    return out


@torch.library.custom_op(named("relu_norm_back"), mutates_args=())
def relu_norm_back(
    grad: Tensor, z: Tensor, bias: Tensor, weight: Tensor, counts: Tensor,
    mean: Tensor, var: Tensor, eps: float, pool: bool, frozen: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradient of z, and by parts still to be summed those of the parameters.

    Where `frozen`, mean and variance do not depend on z.

    Returns:
        Of z `[J, B, H, W, C]`, of the bias `[J, P, C]`, of beta and weight `[J, P, 2, C]`.
    """
    jobs, batch, high, wide, channels = z.shape
    rows, rows_out = batch * high * wide, grad.shape[1] * grad.shape[2] * grad.shape[3]
    tile, steps, parts = _back_tiles(rows_out, channels, pool)
    out = torch.empty_like(z)
    sums = torch.empty(jobs, parts, 2, channels, device=z.device)
    of_bias = torch.empty(jobs, parts, channels, device=z.device)
    given = (z, bias, mean, var, weight, grad, counts)
    sizes = (rows_out, rows, grad.shape[2] * grad.shape[3], wide, steps, channels, tile, pool)
    sums_kernel[(parts, jobs)](*given, sums, eps, *sizes)
    back_kernel[(parts, jobs)](
        *given, sums, out, of_bias, eps, *sizes, parts, triton.next_power_of_2(parts), frozen
    )  # fmt: skip
    return out, of_bias, sums


@relu_norm.register_fake
def _(z, bias, weight, beta, counts, sums, eps, pool):
    jobs, batch, high, wide, channels = z.shape
    out = z.new_empty(jobs, batch, high // (1 + pool), wide // (1 + pool), channels)
    mean = z.new_empty(jobs, channels, dtype=torch.float32)
    return out, mean, torch.empty_like(mean)


@relu_frozen_norm.register_fake
def _(z, bias, weight, beta, counts, mean, var, eps, pool):
    jobs, batch, high, wide, channels = z.shape
    return z.new_empty(jobs, batch, high // (1 + pool), wide // (1 + pool), channels)


@relu_norm_back.register_fake
def _(grad, z, bias, weight, counts, mean, var, eps, pool, frozen):
    jobs, channels = mean.shape
    parts = _back_tiles(grad.shape[1] * grad.shape[2] * grad.shape[3], channels, pool)[2]
    of_bias = mean.new_empty(jobs, parts, channels)
    return torch.empty_like(z), of_bias, mean.new_empty(jobs, parts, 2, channels)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, bias, weight, _, counts, _, ctx.eps, ctx.pool = inputs
    ctx.save_for_backward(z, bias, weight, counts, output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    of_z, of_bias, sums = relu_norm_back(
        grad.contiguous(), *ctx.saved_tensors, ctx.eps, ctx.pool, False
    )
    of_beta, of_weight = sums.sum(1).unbind(1)
    return of_z, of_bias.sum(1), of_weight, of_beta, None, None, None, None


def _keep_frozen(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, bias, weight, _, counts, mean, var, ctx.eps, ctx.pool = inputs
    ctx.save_for_backward(z, bias, weight, counts, mean, var)


def _backward_frozen(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    kept = (value.contiguous() for value in (grad, *ctx.saved_tensors))
    of_z, of_bias, sums = relu_norm_back(*kept, ctx.eps, ctx.pool, True)
    of_beta, of_weight = sums.sum(1).unbind(1)
    return of_z, of_bias.sum(1), of_weight, of_beta, None, None, None, None, None


relu_norm.register_autograd(_backward, setup_context=_keep)
relu_frozen_norm.register_autograd(_backward_frozen, setup_context=_keep_frozen)
