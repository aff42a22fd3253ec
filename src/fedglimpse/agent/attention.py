"""How client tokens take in each other and the history: the paper's Eq. (attnlayers).

Tokens travel as `[T, B, d]`, so that heads fold into the batch without a copy: for the handful of
tokens of a visible set, copies would cost more than the products.

Masks never hold a whole row at minus infinity: a blocked score is lowered by a finite amount whose
exponential is exactly zero in float32, so that a row with nothing to look at cannot become NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCKED = -1e9


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return Softmax(q k / sqrt(width)) v of Eq. (attn), `[T, B * h, width]`, and the weights.

    Args:
        q: queries.  # [T, B * h, width]
        k: keys.  # [S, B * h, width]
        v: values.  # [S, B * h, width]
        bias: zero, or very low where a key must not be seen.  # [B * h, S, 1 or T]
    """
    columns = q.permute(1, 2, 0).contiguous()  # [B * h, width, T]
    scores = torch.baddbmm(bias, k.transpose(0, 1), columns, alpha=q.shape[-1] ** -0.5)
    weights = scores.softmax(dim=1)  # [B * h, S, T]
    return torch.bmm(weights.transpose(1, 2), v.transpose(0, 1)).transpose(0, 1), weights


class SelfAttention(nn.Module):
    """Tokens look at each other; with residual. Projections without bias, as in Eq. (attn)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)  # rows ordered by head, then q, k, v

    def forward(self, tokens: Tensor, bias: Tensor) -> Tensor:
        """Return `tokens` `[T, B, d]` plus what they gathered."""
        rows, sets, dim = tokens.shape
        folded = (rows, sets * self.heads, dim // self.heads)
        q, k, v = self.qkv(tokens).view(*folded[:2], 3, folded[2]).unbind(dim=2)
        return (tokens.view(folded) + attend(q, k, v, bias)[0]).view(rows, sets, dim)


class CrossAttention(nn.Module):
    """Tokens look at a context; with residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)  # rows ordered by head, then k, v

    def forward(self, tokens: Tensor, context: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return `tokens` `[T, B, d]` plus what they gathered, and the weights `[B * h, S, T]`."""
        rows, sets, dim = tokens.shape
        folded = (rows, sets * self.heads, dim // self.heads)
        k, v = self.key_value(context).view(len(context), folded[1], 2, folded[2]).unbind(dim=2)
        gathered, weights = attend(self.query(tokens).view(folded), k, v, bias)
        return (tokens.view(folded) + gathered).view(rows, sets, dim), weights


class SpatioTemporal(nn.Module):
    """Spatial, temporal and cross attention with residuals, Eq. (attnlayers)."""

    def __init__(self, dim: int, heads: int, length: int, spatial: bool, temporal: bool) -> None:
        """Build the layers.

        Args:
            dim: d_token.
            heads: attention heads of every layer.
            length: H+1, tokens of the history.
            spatial: False leaves out the clients' self-attention.
            temporal: False leaves out the history: both its self- and the cross-attention.
        """
        super().__init__()
        self.heads = heads
        self.spatial = SelfAttention(dim, heads) if spatial else None
        self.temporal = SelfAttention(dim, heads) if temporal else None
        self.cross = CrossAttention(dim, heads) if temporal else None
        if temporal:
            self.positions = nn.Parameter(torch.randn(length, 1, dim) * dim**-0.5)  # newest last
        ahead = torch.full((length, length), BLOCKED).tril(-1)
        self.causal: Tensor
        self.register_buffer("causal", ahead, persistent=False)

    def forward(
        self, cluster: Tensor, mask: Tensor, history: Tensor, history_mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return Xi `[V, B, d]` and the cross-attention weights `[B * h, H+1, V]`.

        Args:
            cluster: Theta_cluster, client tokens.  # [V, B, d]
            mask: True for real clients.  # [B, V]
            history: Theta_history, global tokens, newest last.  # [H+1, B, d]
            history_mask: True where the round exists.  # [B, H+1]
        """
        if self.spatial is not None:
            cluster = self.spatial(cluster, self._bias(mask))
        if self.cross is None:
            return cluster, None
        xi, weights = self.cross(
            cluster, self.temporal_tokens(history, history_mask), self._bias(history_mask)
        )
        return xi, weights

    def temporal_tokens(self, history: Tensor, history_mask: Tensor) -> Tensor:
        """Return Theta_temporal: every round sees itself and older rounds that exist."""
        assert self.temporal is not None
        length = len(history)
        causal = self.causal[:length, :length]  # [S, T]
        return self.temporal(history + self.positions, self._bias(history_mask) + causal)

    def _bias(self, mask: Tensor) -> Tensor:
        """Turn a mask of what may be seen `[B, S]` into a bias `[B * h, S, 1]`."""
        if mask.all():  # the usual case, and several small operations less
            return self.causal.new_zeros(1, 1, 1)
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, BLOCKED)
        return bias.repeat_interleave(self.heads, dim=0).unsqueeze(-1)


def shares(mask: Tensor) -> Tensor:
    """Return the weights of a mean over the real entries of `[B, T]`."""
    return mask / mask.sum(dim=1, keepdim=True).clamp_min(1)


def pooled(rows: Tensor, weights: Tensor) -> Tensor:
    """Average `[T, B, d]` with the weights `[B, T]` -> `[B, d]`."""
    return torch.bmm(weights.unsqueeze(1), rows.transpose(0, 1)).squeeze(1)


def entropies(weights: Tensor) -> Tensor:
    """Return the `entropy` of several lanes' weights `[R, h, S, T]`, one for each `[R]`."""
    return -torch.special.xlogy(weights, weights).sum(dim=2).flatten(1).mean(dim=1)


def entropy(weights: Tensor) -> Tensor:
    """Mean entropy in nats of attention weights `[B * h, S, T]` over the contexts S."""
    return -torch.special.xlogy(weights, weights).sum(dim=1).mean()
