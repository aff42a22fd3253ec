"""Attention of many small sets, with its gradient written out.

Sets of ten tokens are so small that the form of a product matters more than its size: those whose
second factor is read by columns take four times as long on a CPU, so these copy it first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Attend(torch.autograd.Function):
    """What queries gather: softmax(K Q' / sqrt(w) + bias)' V, keys first in the weights."""

    @staticmethod
    def forward(
        ctx: Any, own: Tensor, others: Tensor | None, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what is gathered `[n, T, w]`, and the weights `[n, S, T]`, without a gradient.

        Args:
            ctx: keeps what `backward` needs.
            own: queries, keys and values of tokens that look at each other `[n, T, 3w]`, or only
                the queries of tokens that look at others.  # [n, T, w]
            others: keys and values of those others.  # [n, S, 2w]
            bias: zero, or very low where a key must not be seen.  # [n or 1, S or 1, T or 1]
        """
        q, k, v = _parts(own, others)
        scale = q.shape[2] ** -0.5
        weights = torch.baddbmm(bias, k, _turned(q), alpha=scale).softmax(dim=1)
        ctx.save_for_backward(own, others, weights)
        ctx.scale = scale
        ctx.mark_non_differentiable(weights)
        return torch.bmm(weights.transpose(1, 2), v), weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `own` and `others`; the bias is data."""
        own, others, weights = ctx.saved_tensors
        q, k, v = _parts(own, others)
        for_v = torch.bmm(weights, gradients[0])
        for_weights = torch.bmm(v, _turned(gradients[0]))
        for_scores = torch._softmax_backward_data(for_weights, weights, 1, weights.dtype)
        for_scores = for_scores * ctx.scale
        for_k, for_q = torch.bmm(for_scores, q), torch.bmm(for_scores.transpose(1, 2), k)
        if others is None:
            return torch.cat([for_q, for_k, for_v], dim=2), None, None
        return for_q, torch.cat([for_k, for_v], dim=2), None


def attend(own: Tensor, others: Tensor | None, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Apply `Attend`."""
    gathered, weights = Attend.apply(own, others, bias)
    return gathered, weights


def _parts(own: Tensor, others: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values as views."""
    if others is None:
        q, k, v = own.chunk(3, dim=2)
        return q, k, v
    k, v = others.chunk(2, dim=2)
    return own, k, v


def _turned(matrices: Tensor) -> Tensor:
    return matrices.transpose(1, 2).contiguous()
