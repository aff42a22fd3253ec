"""How client tokens take in each other and the history: the paper's Eq. (attnlayers).

Masks never hold a whole row at minus infinity: blocked scores get a finite value whose
exponential is exactly zero in float32, so that a row with nothing to look at cannot become NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BLOCKED = -1e9


class Attention(nn.Module):
    """Multi-head attention as the paper writes it in Eq. (attn): no output projection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.scale = (dim // heads) ** -0.5

    def forward(self, tokens: Tensor, context: Tensor, blocked: Tensor) -> tuple[Tensor, Tensor]:
        """Let `tokens` `[B, T, d]` look at `context` `[B, S, d]`.

        Heads are folded into the batch and keys laid out as `[d, S]` beforehand: for a handful of
        tokens this is several times faster on a CPU than strided products.

        Args:
            tokens: who looks.
            context: what is looked at.
            blocked: True where it must not be seen.  # [B, 1 or T, S]

        Returns:
            What was gathered `[B, T, d]`, and the attention weights `[B, heads, T, S]`.
        """
        sets, rows, width = tokens.shape
        keys, values = self.key_value(context).chunk(2, dim=-1)
        queries = self._fold(self.query(tokens)) * self.scale  # [B * h, T, d / h]
        keys = self._fold(keys).transpose(1, 2).contiguous()  # [B * h, d / h, S]
        bias = torch.zeros(blocked.shape, device=tokens.device).masked_fill_(blocked, _BLOCKED)
        scores = torch.bmm(queries, keys).view(sets, self.heads, rows, -1) + bias[:, None]
        weights = scores.softmax(dim=-1)
        gathered = torch.bmm(weights.flatten(0, 1), self._fold(values))  # [B * h, T, d / h]
        gathered = gathered.view(sets, self.heads, rows, -1).transpose(1, 2)
        return gathered.reshape(sets, rows, width), weights

    def _fold(self, x: Tensor) -> Tensor:
        """Fold heads into the batch: `[B, T, d]` -> `[B * h, T, d / h]`."""
        sets, rows, _ = x.shape
        split = x.reshape(sets, rows, self.heads, -1).transpose(1, 2)
        return split.reshape(sets * self.heads, rows, -1)


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
        self.spatial = Attention(dim, heads) if spatial else None
        self.temporal = Attention(dim, heads) if temporal else None
        self.cross = Attention(dim, heads) if temporal else None
        if temporal:
            self.positions = nn.Parameter(torch.randn(length, dim) * dim**-0.5)  # newest last

    def forward(
        self, cluster: Tensor, mask: Tensor, history: Tensor, history_mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return Xi `[B, V, d]` and the cross-attention weights `[B, heads, V, H+1]`.

        Args:
            cluster: Theta_cluster, client tokens.  # [B, V, d]
            mask: True for real clients.  # [B, V]
            history: Theta_history, global tokens, newest last.  # [B, H+1, d]
            history_mask: True where the round exists.  # [B, H+1]
        """
        if self.spatial is not None:
            cluster = cluster + self.spatial(cluster, cluster, ~mask[:, None])[0]
        if self.temporal is None or self.cross is None:
            return cluster, None
        history = self.temporal_tokens(history, history_mask)
        gathered, weights = self.cross(cluster, history, ~history_mask[:, None])
        return cluster + gathered, weights

    def temporal_tokens(self, history: Tensor, history_mask: Tensor) -> Tensor:
        """Return Theta_temporal: every round sees itself and older rounds that exist."""
        assert self.temporal is not None
        history = history + self.positions
        steps = torch.arange(history.shape[1], device=history.device)
        ahead = steps > steps[:, None]  # [H+1, H+1] the causal mask
        blocked = ahead | ~history_mask[:, None]  # [B, H+1, H+1]
        return history + self.temporal(history, history, blocked)[0]


class PerTokenMLP(nn.Module):
    """The ablation without attention: a client sees itself and the mean of the history."""

    def __init__(self, dim: int, temporal: bool) -> None:
        super().__init__()
        self.temporal = temporal
        width = 2 * dim if temporal else dim
        self.layers = nn.Sequential(nn.Linear(width, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(
        self, cluster: Tensor, mask: Tensor, history: Tensor, history_mask: Tensor
    ) -> tuple[Tensor, None]:
        """As `SpatioTemporal.forward`; there are no attention weights."""
        if not self.temporal:
            return cluster + self.layers(cluster), None
        past = masked_mean(history, history_mask)[:, None].expand_as(cluster)
        return cluster + self.layers(torch.cat([cluster, past], dim=-1)), None


def masked_mean(rows: Tensor, mask: Tensor) -> Tensor:
    """Average `[B, T, d]` over the real entries of `[B, T]`."""
    kept = mask.unsqueeze(-1).to(rows.dtype)
    return (rows * kept).sum(dim=1) / kept.sum(dim=1).clamp_min(1.0)


def entropy(weights: Tensor, mask: Tensor) -> Tensor:
    """Mean entropy in nats of the attention rows `[B, heads, V, S]` of real clients."""
    rows = -torch.special.xlogy(weights, weights).sum(dim=-1).mean(dim=1)  # [B, V]
    return rows[mask].mean()
