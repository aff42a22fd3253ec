"""The spatio-temporal attention Q-network, for R lanes at once.

The paper's Sec. "Spatio-Temporal Attention-based Q-Network": one Q-value for every visible client,
for any number of clients. Every lane has its own weights, so every parameter has a first dimension
R, and every product is one batched product over lanes. Tokens travel as `[R, B * T, d]`: T tokens
(clients or past global models) of each of B rounds. All parameters of a network are views of one
matrix `rows` `[R, P]`, which an optimizer moves at once (`learner.py`).

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

from fedglimpse import rng
from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.inputs import Observation

BLOCKED = -1e9
_IDENTITY_BLOCK = 64  # identities drawn together; a first value depends on seed and id only


class LaneLinear(nn.Module):
    """A linear layer of every lane, with the first values of `torch.nn.Linear`."""

    def __init__(self, lanes: int, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(lanes, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(lanes, outputs)) if bias else None

    def draw_weights(self, lane: int) -> None:
        """Draw the first values of a lane."""
        nn.init.kaiming_uniform_(self.weight.data[lane], a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight.shape[2])
            nn.init.uniform_(self.bias.data[lane], -bound, bound)

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        """Apply every lane's layer to `[R, n, inputs]`; without a bias, add to `onto`."""
        weight = self.weight.transpose(1, 2)  # [R, inputs, outputs]
        if self.bias is not None:
            onto = self.bias.unsqueeze(1)
        return torch.bmm(x, weight) if onto is None else torch.baddbmm(onto, x, weight)


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
            return torch.addcmul(
                self.bias.unsqueeze(1), F.layer_norm(x, shape), self.weight.unsqueeze(1)
            )
        # On a CPU one fused kernel per lane is faster than several operations for all lanes.
        if len(x) == 1:
            return F.layer_norm(x, shape, self.weight.squeeze(0), self.bias.squeeze(0))
        lanes = zip(x.unbind(), self.weight.unbind(), self.bias.unbind(), strict=True)
        return torch.stack([F.layer_norm(tokens, shape, w, b) for tokens, w, b in lanes])


class Encoder(nn.Module):
    """f_enc: features to tokens by Linear, GELU, LayerNorm; shared by clients and global models.

    Where clients are seen by a few numbers instead of a sketch, clients and global models have a
    Linear each into the shared rest.
    """

    def __init__(self, lanes: int, features: int, sketch_dim: int, dim: int, shared: bool) -> None:
        super().__init__()
        self.client_input = LaneLinear(lanes, features, dim)
        self.global_input = None if shared else LaneLinear(lanes, sketch_dim, dim)
        self.norm = LaneNorm(lanes, dim)

    def forward(self, clients: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        """Return client tokens and tokens of global models.

        Args:
            clients: features.  # [R, B * V, F]
            history: sketches of global models.  # [R, B * T, D]
        """
        if self.global_input is None:
            both = self.client_input(torch.cat([clients, history], dim=1))
        else:
            both = torch.cat([self.client_input(clients), self.global_input(history)], dim=1)
        tokens = self.norm(F.gelu(both))
        client_tokens, history_tokens = tokens.split([clients.shape[1], history.shape[1]], dim=1)
        return client_tokens, history_tokens

    def globals(self, sketches: Tensor) -> Tensor:
        """Return tokens of global models alone `[R, n, d]`."""
        layer = self.client_input if self.global_input is None else self.global_input
        tokens: Tensor = self.norm(F.gelu(layer(sketches)))
        return tokens


class Attention(torch.autograd.Function):
    """Softmax(Q K' / sqrt(width)) V of Eq. (attn), with its gradient written out.

    Sets of ten tokens are so small that every operation counts; this has fewer than autograd's.
    Call `Attention.apply`.
    """

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor
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
        scores = torch.baddbmm(bias, keys, queries.transpose(1, 2), alpha=ctx.scale)
        weights = scores.softmax(dim=1)  # [n, S, T]
        ctx.save_for_backward(queries, keys, values, weights)
        ctx.mark_non_differentiable(weights)
        return torch.bmm(weights.transpose(1, 2), values), weights

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values; the bias is data."""
        queries, keys, values, weights = ctx.saved_tensors
        for_gathered = gradients[0]  # [n, T, width]
        for_values = torch.bmm(weights, for_gathered)
        for_weights = torch.bmm(values, for_gathered.transpose(1, 2))
        for_scores = torch._softmax_backward_data(for_weights, weights, 1, weights.dtype)
        for_scores = for_scores * ctx.scale
        for_keys = torch.bmm(for_scores, queries)
        for_queries = torch.bmm(for_scores.transpose(1, 2), keys)
        return for_queries, for_keys, for_values, None


def split_heads(tokens: Tensor, sets: int, heads: int) -> Tensor:
    """Put every head of a set by itself: `[R, B * T, h * w]` -> `[R * B * h, T, w]`."""
    if heads == 1:
        return tokens.view(sets, -1, tokens.shape[-1])
    width = tokens.shape[-1] // heads
    return tokens.view(sets, -1, heads, width).transpose(1, 2).flatten(0, 1)


def join_heads(gathered: Tensor, shape: torch.Size, heads: int) -> Tensor:
    """Undo `split_heads`: `[R * B * h, T, w]` -> `[R, B * T, d]`."""
    if heads > 1:
        gathered = gathered.view(-1, heads, *gathered.shape[1:]).transpose(1, 2)
    return gathered.reshape(shape)


class SelfAttention(nn.Module):
    """Tokens look at each other; with residual. Projections without bias, as in Eq. (attn)."""

    def __init__(self, lanes: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = LaneLinear(lanes, dim, 3 * dim, bias=False)  # ordered by head, then q, k, v

    def forward(self, tokens: Tensor, sets: int, bias: Tensor) -> Tensor:
        """Return `tokens` `[R, B * T, d]` plus what they gathered within each of R * B sets."""
        by_head = split_heads(self.qkv(tokens), sets, self.heads)
        queries, keys, values = by_head.chunk(3, dim=2)
        gathered, _ = Attention.apply(queries, keys, values, bias)
        return tokens + join_heads(gathered, tokens.shape, self.heads)


class CrossAttention(nn.Module):
    """Tokens look at a context; with residual."""

    def __init__(self, lanes: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = LaneLinear(lanes, dim, dim, bias=False)
        self.key_value = LaneLinear(lanes, dim, 2 * dim, bias=False)  # by head, then k, v

    def forward(
        self, tokens: Tensor, context: Tensor, sets: int, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return `tokens` plus what they gathered, and the weights `[R * B * h, S, T]`."""
        queries = split_heads(self.query(tokens), sets, self.heads)
        keys, values = split_heads(self.key_value(context), sets, self.heads).chunk(2, dim=2)
        gathered, weights = Attention.apply(queries, keys, values, bias)
        return tokens + join_heads(gathered, tokens.shape, self.heads), weights


class SpatioTemporal(nn.Module):
    """Spatial, temporal and cross attention with residuals, Eq. (attnlayers)."""

    def __init__(self, lanes: int, config: AgentConfig) -> None:
        super().__init__()
        dim = config.d_token
        heads = config.heads
        length = config.history + 1
        self.heads = heads
        self.spatial = SelfAttention(lanes, dim, heads) if config.spatial_attention else None
        self.temporal: SelfAttention | None = None
        self.cross: CrossAttention | None = None
        if config.temporal_attention:  # without, the history is not read at all
            self.temporal = SelfAttention(lanes, dim, heads)
            self.cross = CrossAttention(lanes, dim, heads)
            self.positions = nn.Parameter(torch.empty(lanes, length, 1, dim))  # newest last
        newer = torch.full((length, length), BLOCKED).tril(-1)  # [S, T] keys after the query
        self.causal: Tensor
        self.register_buffer("causal", newer, persistent=False)

    def draw_weights(self, lane: int) -> None:
        """Draw the first values of a lane's positions."""
        if self.temporal is not None:
            self.positions.data[lane] = (
                torch.randn(self.positions.shape[1:]) * self.positions.shape[-1] ** -0.5
            )

    def forward(
        self, clients: Tensor, history: Tensor, obs: Observation, full: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return Xi `[R, B * V, d]` and the cross-attention weights `[R * B * h, H+1, V]`.

        Args:
            clients: Theta_cluster, client tokens.  # [R, B * V, d]
            history: Theta_history, tokens of global models.  # [R, B * T, d]
            obs: for its masks.
            full: they are known to be True everywhere.
        """
        lanes, rounds, length = obs.history_mask.shape
        sets = lanes * rounds
        if self.spatial is not None:
            clients = self.spatial(clients, sets, self.bias(obs.mask, full))
        if self.temporal is None or self.cross is None:
            return clients, None
        exists = self.bias(obs.history_mask, full)
        positions = self.positions.transpose(1, 2)  # [R, 1, T, d]
        by_round = history.view(lanes, rounds, length, -1) + positions
        # Theta_temporal: every round sees itself and older rounds that exist.
        past = self.temporal(by_round.view(history.shape), sets, exists + self.causal)
        xi: tuple[Tensor, Tensor] = self.cross(clients, past, sets, exists)
        return xi

    def bias(self, mask: Tensor, full: bool) -> Tensor:
        """Turn a mask of what may be seen `[R, B, S]` into a bias `[R * B * h, S, 1]`."""
        if full:
            return self.causal.new_zeros(1, 1, 1)
        bias = self.causal.new_zeros(mask.shape).masked_fill(~mask, BLOCKED)
        by_head = bias[:, :, None, :, None].expand(-1, -1, self.heads, -1, -1)
        return by_head.flatten(0, 2)


class Dueling(nn.Module):
    """Value of the round plus centred advantages of clients (paper, "Dueling Q-Value ...")."""

    def __init__(self, lanes: int, dim: int, identity: int, outputs: int, context: bool) -> None:
        """Build both heads.

        Args:
            lanes: R.
            dim: d_token.
            identity: d_emb, zero without identities.
            outputs: 1, or C for one Q per class.
            context: let the advantage also read the pooled visible set, as the release does.
        """
        super().__init__()
        hidden = max(dim // 2, 8)

        def of_identity() -> LaneLinear | None:
            return LaneLinear(lanes, identity, hidden, bias=False) if identity else None

        self.value_input = LaneLinear(lanes, dim, hidden)
        self.value_identity = of_identity()
        self.value_output = LaneLinear(lanes, hidden, outputs)
        self.advantage_input = LaneLinear(lanes, dim, hidden)
        self.advantage_identity = of_identity()
        self.advantage_context = LaneLinear(lanes, dim, hidden, bias=False) if context else None
        self.advantage_output = LaneLinear(lanes, hidden, outputs)

    def forward(self, xi: Tensor, identity: Tensor | None, mask: Tensor) -> Tensor:
        """Return Q `[R, B, V, outputs]`: Val(mean xi, mean e) + Adv(xi_i, e(i)) - mean Adv.

        A Linear on concatenated inputs is written as a sum of Linears on its parts: what is the
        same for a whole set is computed once.

        Args:
            xi: client tokens.  # [R, B * V, d]
            identity: e of every client.  # [R, B * V, d_emb]
            mask: True for real clients.  # [R, B, V]
        """
        share = (mask / mask.sum(dim=2, keepdim=True).clamp_min(1)).unsqueeze(2)  # [R, B, 1, V]
        cluster = pooled(xi, share)  # [R, B, d]
        value = self.value_input(cluster)
        advantage = self.advantage_input(xi)  # [R, B * V, hidden]
        if self.value_identity is not None and self.advantage_identity is not None:
            assert identity is not None
            value = self.value_identity(pooled(identity, share), value)
            advantage = self.advantage_identity(identity, advantage)
        if self.advantage_context is not None:
            context = self.advantage_context(cluster).unsqueeze(2)  # [R, B, 1, hidden]
            advantage = (advantage.view(*mask.shape, -1) + context).flatten(1, 2)
        value = self.value_output(F.gelu(value))  # [R, B, outputs]
        advantage = self.advantage_output(F.gelu(advantage))  # [R, B * V, outputs]
        level = value - pooled(advantage, share)
        return advantage.view(*mask.shape, -1) + level.unsqueeze(2)


def pooled(tokens: Tensor, share: Tensor) -> Tensor:
    """Average `[R, B * V, d]` over V with the weights `[R, B, 1, V]` -> `[R, B, d]`."""
    lanes, rounds, _, visible = share.shape
    by_set = tokens.reshape(lanes * rounds, visible, -1)
    return torch.bmm(share.flatten(0, 1), by_set).view(lanes, rounds, -1)


class IdentityTable(nn.Module):
    """Identity-aware embedding, Eq. (idemb): one trainable vector per client of each lane."""

    def __init__(self, lanes: int, num_clients: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(lanes, num_clients, dim))
        self.norm = LaneNorm(lanes, dim)

    def draw_identities(self, lane: int, seed: int) -> None:
        """Draw the first values of a lane."""
        self.weight.data[lane] = fresh_identities(seed, *self.weight.shape[1:])

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids `[R, n]` -> `[R, n, dim]`, each lane by its own table."""
        lanes, rows, dim = self.weight.shape
        first_rows = torch.arange(lanes, device=ids.device).view(lanes, 1) * rows
        vectors = F.embedding(ids + first_rows, self.weight.reshape(lanes * rows, dim))
        embedded: Tensor = self.norm(vectors)
        return embedded


def fresh_identities(seed: int, rows: int, dim: int) -> Tensor:
    """Draw the first identities of clients 0 to `rows` - 1, whatever their number `[rows, dim]`."""
    blocks = []
    for block in range(math.ceil(rows / _IDENTITY_BLOCK)):
        draw = rng.generator(seed, "identity", block)
        blocks.append(torch.randn(_IDENTITY_BLOCK, dim, generator=draw))
    return torch.cat(blocks)[:rows]


class QNetwork(nn.Module):
    """Q-values of visible clients from their features, identities and the global history."""

    def __init__(
        self, config: AgentConfig, sizes: AgentSizes, seeds: Sequence[int], device: torch.device
    ) -> None:
        """Build a network for each lane, with weights drawn from its seed alone.

        Args:
            config: the architecture; see `AgentConfig`.
            sizes: the sizes that it does not say.
            seeds: of the lanes.
            device: where the parameters live.
        """
        super().__init__()
        lanes = len(seeds)
        dim = config.d_token
        features = sizes.features(config)
        outputs = sizes.outputs(config)
        identity_dim = config.identity_dim if config.identity == "table" else 0
        self.per_class = config.q_output == "per_class"
        self.identity = (
            IdentityTable(lanes, sizes.num_clients, identity_dim) if identity_dim else None
        )
        self.encoder = Encoder(lanes, features, sizes.sketch_dim, dim, config.reads_sketches)
        self.mixer = SpatioTemporal(lanes, config)
        self.heads = Dueling(lanes, dim, identity_dim, outputs, config.advantage_context)
        self.histogram_head = (
            LaneLinear(lanes, dim, sizes.num_classes) if config.aux_weight > 0 else None
        )
        for lane, seed in enumerate(seeds):
            self.draw_weights(lane, seed)
        self.to(device)
        self.rows = _joined(self)  # [R, P] all parameters of a lane side by side

    def draw_weights(self, lane: int, seed: int) -> None:
        """Draw the first weights of a lane."""
        if self.identity is not None:
            self.identity.draw_identities(lane, seed)
        with rng.isolated(seed, "qnet"):
            _draw_in_order(self, lane)

    def forward(self, obs: Observation, full: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return Q and the cross-attention weights.

        Args:
            obs: what the agents saw.
            full: no client and no round is masked, which saves work.

        Returns:
            Q `[R, B, V]`, or `[R, B, V, C]` per class, of no meaning in padded slots; and weights
            `[R * B * heads, H+1, V]`, or None without a cross-attention.
        """
        clients, history = self.encoder(obs.clients.flatten(1, 2), obs.history.flatten(1, 2))
        xi, weights = self.mixer(clients, history, obs, full)
        identity = None if self.identity is None else self.identity(obs.ids.flatten(1))
        q = self.heads(xi, identity, obs.mask)  # [R, B, V, 1 or C]
        return (q if self.per_class else q.squeeze(-1)), weights

    def histogram(self, obs: Observation) -> Tensor:
        """Predict the class histogram of the current global model from its token `[R, B, C]`."""
        assert self.histogram_head is not None
        shares: Tensor = self.histogram_head(self.encoder.globals(obs.history[:, :, -1]))
        return shares.softmax(dim=-1)

    def lane_weights(self, lane: int) -> dict[str, Tensor]:
        """Return copies of the parameters of one lane by name, on the CPU."""
        return {name: p.detach()[lane].cpu().clone() for name, p in self.named_parameters()}

    @torch.no_grad()
    def load_lane_weights(self, lane: int, weights: dict[str, Tensor]) -> None:
        """Take over the parameters of one lane, named as in `lane_weights`."""
        for name, parameter in self.named_parameters():
            parameter[lane] = weights[name].view(parameter.shape[1:])


def _joined(net: nn.Module) -> Tensor:
    """Move all parameters `[R, *shape]` into one matrix `[R, P]` and leave views of it behind."""
    parameters = list(net.parameters())
    rows = torch.cat([parameter.data.flatten(1) for parameter in parameters], dim=1)
    widths = [parameter[0].numel() for parameter in parameters]
    for parameter, columns in zip(parameters, rows.split(widths, dim=1), strict=True):
        parameter.data = columns.view(parameter.shape)
    return rows


def _draw_in_order(module: nn.Module, lane: int) -> None:
    """Draw a lane's weights, those of inner layers first."""
    for layer in module.children():
        _draw_in_order(layer, lane)
    if isinstance(module, LaneLinear | SpatioTemporal):
        module.draw_weights(lane)
