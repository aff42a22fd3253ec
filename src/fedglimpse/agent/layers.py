"""Layers of R lanes: what `network.py` puts the Q-network together from.

Every parameter has a first dimension R, and every product is one for all lanes. Tokens travel as
`[R, B * T, d]`: T tokens (clients or past global models) of each of B rounds.

Masks never hold a whole row at minus infinity: a blocked score is lowered by a finite amount whose
exponential is exactly zero in float32, so that a row with nothing to look at cannot become NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKED = -1e9


class LaneLinear(nn.Module):
    """A linear layer of every lane, with the first values of `torch.nn.Linear`."""

    def __init__(
        self,
        lanes: int,
        inputs: int,
        outputs: int,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(lanes, outputs, inputs))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(lanes, outputs))

    def draw_weights(self, lane: int) -> None:
        """Draw the first values of a lane."""
        weight = self.weight.data[lane]
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
        if self.bias is not None:
            inputs = self.weight.shape[2]
            bound = 1 / math.sqrt(inputs)
            nn.init.uniform_(self.bias.data[lane], -bound, bound)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Apply every lane's layer to `[R, n, inputs]`; without a bias, add to `onto`."""
        weight = self.weight.transpose(1, 2)  # [R, inputs, outputs]
        if self.bias is not None:
            onto = self.bias.unsqueeze(1)  # [R, 1, outputs]
        if onto is None:
            return torch.bmm(x, weight)
        return torch.baddbmm(onto, x, weight)


class LaneNorm(nn.Module):
    """LayerNorm of every lane."""

    def __init__(self, lanes: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(lanes, dim))
        self.bias = nn.Parameter(torch.zeros(lanes, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of `[R, n, d]`."""
        shape = x.shape[-1:]
        if x.device.type != "cpu":
            normalised = F.layer_norm(x, shape)
            bias = self.bias.unsqueeze(1)  # [R, 1, d]
            weight = self.weight.unsqueeze(1)
            return torch.addcmul(bias, normalised, weight)
        # On a CPU one fused kernel per lane is faster than several operations for all lanes.
        if len(x) == 1:
            return F.layer_norm(
                x,
                shape,
                self.weight.squeeze(0),
                self.bias.squeeze(0),
            )
        weights = self.weight.unbind()
        biases = self.bias.unbind()
        normalised_lanes: list[Tensor] = []
        for lane, tokens in enumerate(x.unbind()):
            of_lane = F.layer_norm(tokens, shape, weights[lane], biases[lane])
            normalised_lanes.append(of_lane)
        return torch.stack(normalised_lanes)


class Attention(torch.autograd.Function):
    """Softmax(Q K' / sqrt(width)) V of Eq. (attn), with its gradient written out.

    Sets of ten tokens are so small that every operation counts; this has fewer than autograd's.
    Call `Attention.apply`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return what the queries gather `[n, T, width]`, and the weights `[n, S, T]`, keys first.

        Args:
            ctx: keeps what `backward` needs.
            queries: of T tokens in each of n sets.  # [n, T, width]
            keys: of S tokens in each set.  # [n, S, width]
            values: of the same.  # [n, S, width]
            bias: zero, or `BLOCKED` where a key must not be seen.  # [n or 1, S or 1, T or 1]
        """
        ctx.scale = queries.shape[2] ** -0.5
        scores = torch.baddbmm(
            bias,
            keys,
            queries.transpose(1, 2),
            alpha=ctx.scale,
        )
        weights = scores.softmax(dim=1)  # [n, S, T]
        gathered = torch.bmm(weights.transpose(1, 2), values)  # [n, T, width]
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.mark_non_differentiable(weights)
        return gathered, weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values; the bias is data."""
        queries, keys, values, weights = ctx.saved_tensors
        for_gathered = gradients[0]  # [n, T, width]
        for_values = torch.bmm(weights, for_gathered)  # [n, S, width]
        for_weights = torch.bmm(values, for_gathered.transpose(1, 2))  # [n, S, T]
        for_scores = torch._softmax_backward_data(for_weights, weights, 1, weights.dtype)
        for_products = for_scores * ctx.scale
        for_keys = torch.bmm(for_products, queries)  # [n, S, width]
        for_queries = torch.bmm(for_products.transpose(1, 2), keys)  # [n, T, width]
        return for_queries, for_keys, for_values, None


def attend(
    tokens: Tensor, projections: Sequence[Tensor], heads: int, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Add to tokens what they gather within their set, every head by itself.

    Args:
        tokens: T of each set.  # [R, B * T, d], d being h * w
        projections: queries of the tokens, keys and values of S tokens, all in one tensor or in
            several. Each is ordered by head, then queries, keys, values.  # [R, B * T or S, h * ..]
        heads: h.
        hidden: `BLOCKED` where a key must not be seen, else zero.  # [R * B, S, T or 1]

    Returns:
        The tokens, and the weights `[R * B * h, S, T]`.
    """
    sets = len(hidden)
    dim = tokens.shape[2]
    parts: list[Tensor] = []
    for projected in projections:
        outputs = projected.shape[2]  # d, 2 d or 3 d
        by_set = projected.view(sets, -1, heads, outputs // heads)
        by_head = by_set.transpose(1, 2).flatten(0, 1)  # [R * B * h, T or S, w, 2 w or 3 w]
        parts += by_head.chunk(outputs // dim, dim=2)
    queries, keys, values = parts  # [R * B * h, T or S, w]
    if heads > 1:
        of_heads = hidden.unsqueeze(1).expand(-1, heads, -1, -1)
        hidden = of_heads.flatten(0, 1)  # [R * B * h, S, T or 1]
    gathered, weights = Attention.apply(queries, keys, values, hidden)
    of_sets = gathered.view(sets, heads, -1, dim // heads)
    joined_heads = of_sets.transpose(1, 2).reshape(tokens.shape)
    return tokens + joined_heads, weights


class SelfAttention(nn.Module):
    """Tokens look at each other; with residual. Without a bias, as in Eq. (attn)."""

    def __init__(self, lanes: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = LaneLinear(lanes, dim, 3 * dim, bias=False)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return `tokens` plus what they gathered; arguments as in `attend`."""
        enriched, _ = attend(
            tokens,
            [self.qkv(tokens)],
            self.heads,
            hidden,
        )
        return enriched


class CrossAttention(nn.Module):
    """Tokens look at a context; with residual."""

    def __init__(self, lanes: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = LaneLinear(lanes, dim, dim, bias=False)
        self.key_value = LaneLinear(lanes, dim, 2 * dim, bias=False)

    def forward(
        self,
        tokens: Tensor,
        context: Tensor,
        hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return `tokens` plus what they gathered from `context`, and the weights."""
        projections = [self.query(tokens), self.key_value(context)]
        return attend(tokens, projections, self.heads, hidden)
