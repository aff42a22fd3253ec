"""ReLU, BatchNorm and 2x2 max-pooling of J clients in as few passes over memory as possible.

The client models put these behind every convolution: y = pool(BatchNorm(ReLU(z + bias))). Written
layer by layer they read and write the activations a dozen times a step; here

    forward   reads z and writes y; the convolution has summed what the statistics are made of
    backward  reads z and the gradient twice (sums, then result) and writes the gradient of z

Everything between is recomputed in registers. Sums are in float32 and in a fixed order.

`relu_norm_kernels.py` has the kernels. They see a client's images as a matrix, one row for each
pixel and one column for each channel; a program works on a block of rows at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fedglimpse.simulation.cuda.operator_names import versioned_name
from fedglimpse.simulation.cuda.relu_norm_kernels import (
    gradient_kernel,
    gradient_sums_kernel,
    result_kernel,
    statistics_kernel,
)

_MAX_PROGRAMS = 32  # that share a client's pixels
_BLOCK_NUMBERS = 2048  # of z that a program holds at a time; twice as many where it only writes


class _Blocks(NamedTuple):
    """How the programs of a kernel share a client's pixels."""

    rows: int  # pixels that a program holds at a time
    steps: int  # blocks that a program works on, one after the other
    programs: int  # of a client

    @staticmethod
    def of(pixels: int, channels: int, numbers: int) -> _Blocks:
        """Return blocks of about so many numbers."""
        rows = max(numbers // channels, 8)
        programs = min(_MAX_PROGRAMS, triton.cdiv(pixels, rows))
        return _Blocks(rows, triton.cdiv(pixels, programs * rows), programs)

    @staticmethod
    def of_gradient(grad: Tensor, pool: bool) -> _Blocks:
        """Return blocks of the gradient of y `[J, B, H', W', C]`; pooling holds four inputs."""
        _, batch, height, width, channels = grad.shape
        numbers = _BLOCK_NUMBERS // 2 if pool else _BLOCK_NUMBERS
        return _Blocks.of(batch * height * width, channels, numbers)


@torch.library.custom_op(versioned_name("relu_norm"), mutates_args=())
def relu_norm(
    z: Tensor,
    bias: Tensor,
    weight: Tensor,
    beta: Tensor,
    counts: Tensor,
    sums: Tensor,
    eps: float,
    pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return pool(BatchNorm(ReLU(z + bias))) with the batch's own statistics, mean and variance.

    Args:
        z: outputs of a convolution; even-sided where pooled.  # [J, B, H, W, C]
        bias: of that convolution.  # [J, C]
        weight: of the norm.  # [J, C]
        beta: the norm's bias.  # [J, C]
        counts: real images of each client; the rest is padding.  # [J] int64
        sums: partial sums of r and r^2, r = ReLU(z + bias), of real images.  # [J, P, 2, C]
        eps: of the norm.
        pool: 2x2 max-pooling.

    Returns:
        y `[J, B, H', W', C]`, mean `[J, C]` and biased variance `[J, C]`.
    """
    jobs, _, height, width, channels = z.shape
    partials = sums.shape[1]
    mean = torch.empty(jobs, channels, device=z.device)
    var = torch.empty_like(mean)
    scale = torch.empty_like(mean)
    shift = torch.empty_like(mean)
    statistics_kernel[(jobs,)](
        sums, weight, beta, counts, mean, var, scale, shift, height * width, eps,
        channels, partials, min(triton.next_power_of_2(partials), _MAX_PROGRAMS),
    )  # fmt: skip
    return relu_affine(z, bias, scale, shift, counts, pool), mean, var


@torch.library.custom_op(versioned_name("relu_frozen_norm"), mutates_args=())
def relu_frozen_norm(
    z: Tensor,
    bias: Tensor,
    weight: Tensor,
    beta: Tensor,
    counts: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    pool: bool,
) -> Tensor:
    """Return pool(BatchNorm(ReLU(z + bias))) with given statistics, `[J, C]` each.

    The other arguments and y are those of `relu_norm`.
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
    jobs, batch, height, width, channels = z.shape
    y = _empty_result(z, pool)
    pixels_in = batch * height * width
    per_image = y.shape[2] * y.shape[3]
    pixels_out = batch * per_image
    block = _Blocks.of(pixels_in, channels, 2 * _BLOCK_NUMBERS).rows
    result_kernel[(triton.cdiv(pixels_out, block), jobs)](
        z, bias.contiguous(), scale.contiguous(), shift.contiguous(), counts, y,
        pixels_out, pixels_in, per_image, width, channels, block, pool,
    )  # fmt: skip
    return y


def _empty_result(z: Tensor, pool: bool) -> Tensor:
    """Return memory for y `[J, B, H', W', C]`."""
    jobs, batch, height, width, channels = z.shape
    if pool:
        return z.new_empty(jobs, batch, height // 2, width // 2, channels)
    return z.new_empty(jobs, batch, height, width, channels)


@torch.library.custom_op(versioned_name("relu_norm_back"), mutates_args=())
def relu_norm_back(
    grad: Tensor,
    z: Tensor,
    bias: Tensor,
    weight: Tensor,
    counts: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    pool: bool,
    frozen: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of z, and partial sums of those of the parameters.

    Where `frozen`, mean and variance do not depend on z.

    Returns:
        Of z `[J, B, H, W, C]`, of the bias `[J, P, C]`, of beta and weight `[J, P, 2, C]`.
    """
    jobs, batch, height, width, channels = z.shape
    pixels_in = batch * height * width
    per_image = grad.shape[2] * grad.shape[3]
    pixels_out = grad.shape[1] * per_image
    blocks = _Blocks.of_gradient(grad, pool)
    partials = blocks.programs
    grad_z = torch.empty_like(z)
    sums = torch.empty(jobs, partials, 2, channels, device=z.device)
    grad_bias = torch.empty(jobs, partials, channels, device=z.device)
    tensors = (z, bias, mean, var, weight, grad, counts)
    sizes = (pixels_out, pixels_in, per_image, width, blocks.steps, channels, blocks.rows, pool)
    grid = (partials, jobs)
    gradient_sums_kernel[grid](*tensors, sums, eps, *sizes)
    gradient_kernel[grid](
        *tensors, sums, grad_z, grad_bias, eps, *sizes,
        partials, triton.next_power_of_2(partials), frozen,
    )  # fmt: skip
    return grad_z, grad_bias, sums


@relu_norm.register_fake
def _(
    z: Tensor,
    bias: Tensor,
    weight: Tensor,
    beta: Tensor,
    counts: Tensor,
    sums: Tensor,
    eps: float,
    pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    jobs = z.shape[0]  # `len` would fix it for compiled code
    channels = z.shape[4]
    mean = z.new_empty(jobs, channels, dtype=torch.float32)
    return _empty_result(z, pool), mean, torch.empty_like(mean)


@relu_frozen_norm.register_fake
def _(
    z: Tensor,
    bias: Tensor,
    weight: Tensor,
    beta: Tensor,
    counts: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    pool: bool,
) -> Tensor:
    return _empty_result(z, pool)


@relu_norm_back.register_fake
def _(
    grad: Tensor,
    z: Tensor,
    bias: Tensor,
    weight: Tensor,
    counts: Tensor,
    mean: Tensor,
    var: Tensor,
    eps: float,
    pool: bool,
    frozen: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    jobs, channels = mean.shape
    partials = _Blocks.of_gradient(grad, pool).programs
    grad_bias = mean.new_empty(jobs, partials, channels)
    return torch.empty_like(z), grad_bias, mean.new_empty(jobs, partials, 2, channels)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, bias, weight, _, counts, _, ctx.eps, ctx.pool = inputs
    _, mean, var = output
    ctx.save_for_backward(z, bias, weight, counts, mean, var)
    ctx.mark_non_differentiable(mean, var)


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    grad_z, grad_bias, sums = relu_norm_back(
        grad.contiguous(), *ctx.saved_tensors, ctx.eps, ctx.pool, False
    )
    grad_beta, grad_weight = sums.sum(1).unbind(1)
    return grad_z, grad_bias.sum(1), grad_weight, grad_beta, None, None, None, None


def _save_frozen(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    z, bias, weight, _, counts, mean, var, ctx.eps, ctx.pool = inputs
    ctx.save_for_backward(z, bias, weight, counts, mean, var)


def _backward_frozen(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = [tensor.contiguous() for tensor in ctx.saved_tensors]
    grad_z, grad_bias, sums = relu_norm_back(grad.contiguous(), *saved, ctx.eps, ctx.pool, True)
    grad_beta, grad_weight = sums.sum(1).unbind(1)
    return grad_z, grad_bias.sum(1), grad_weight, grad_beta, None, None, None, None, None


relu_norm.register_autograd(_backward, setup_context=_save)
relu_frozen_norm.register_autograd(_backward_frozen, setup_context=_save_frozen)
