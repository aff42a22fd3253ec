"""The spatio-temporal attention Q-network, for R lanes at once.

The paper's Sec. "Spatio-Temporal Attention-based Q-Network": one Q-value for every visible client,
for any number of clients. Every lane has its own weights, so every parameter has a first dimension
R, and every product is one for all lanes. Tokens travel as `[R, B * T, d]`: T tokens (clients or
past global models) of each of B rounds. All parameters are views of one matrix `rows` `[R, P]`,
which an optimizer moves at once (`learner.py`).

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
_IDENTITY_BLOCK = 64  # identities that are drawn together


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
            return torch.addcmul(self.bias.unsqueeze(1), normalised, self.weight.unsqueeze(1))
        # On a CPU one fused kernel per lane is faster than several operations for all lanes.
        if len(x) == 1:
            return F.layer_norm(x, shape, self.weight.squeeze(0), self.bias.squeeze(0))
        lanes = zip(x.unbind(), self.weight.unbind(), self.bias.unbind(), strict=True)
        normalised_lanes: list[Tensor] = []
        for tokens, weight, bias in lanes:
            normalised_lanes.append(F.layer_norm(tokens, shape, weight, bias))
        return torch.stack(normalised_lanes)


class Encoder(nn.Module):
    """f_enc: features to tokens by Linear, GELU, LayerNorm; shared by clients and global models.

    Clients that are seen by a few numbers have a Linear of their own into the shared rest.
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
            inputs = torch.cat([clients, history], dim=1)  # [R, B * (V + T), F], F being D
            projected = self.client_input(inputs)
        else:
            projected_clients = self.client_input(clients)
            projected_history = self.global_input(history)
            projected = torch.cat([projected_clients, projected_history], dim=1)
        tokens = self.norm(F.gelu(projected))  # [R, B * (V + T), d]
        counts = [clients.shape[1], history.shape[1]]
        client_tokens, history_tokens = tokens.split(counts, dim=1)
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
        by_head = projected.view(sets, -1, heads, outputs // heads).transpose(1, 2).flatten(0, 1)
        parts += by_head.chunk(outputs // dim, dim=2)
    queries, keys, values = parts  # [R * B * h, T or S, w]
    if heads > 1:
        hidden = hidden.unsqueeze(1).expand(-1, heads, -1, -1).flatten(0, 1)
    gathered, weights = Attention.apply(queries, keys, values, hidden)
    by_set = gathered.view(sets, heads, -1, dim // heads).transpose(1, 2)  # [R * B, T, h, w]
    return tokens + by_set.reshape(tokens.shape), weights


class SelfAttention(nn.Module):
    """Tokens look at each other; with residual. Without a bias, as in Eq. (attn)."""

    def __init__(self, lanes: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = LaneLinear(lanes, dim, 3 * dim, bias=False)

    def forward(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return `tokens` plus what they gathered; arguments as in `attend`."""
        enriched, _ = attend(tokens, [self.qkv(tokens)], self.heads, hidden)
        return enriched


class CrossAttention(nn.Module):
    """Tokens look at a context; with residual."""

    def __init__(self, lanes: int, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = LaneLinear(lanes, dim, dim, bias=False)
        self.key_value = LaneLinear(lanes, dim, 2 * dim, bias=False)

    def forward(self, tokens: Tensor, context: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return `tokens` plus what they gathered from `context`, and the weights."""
        projections = [self.query(tokens), self.key_value(context)]
        return attend(tokens, projections, self.heads, hidden)


class SpatioTemporal(nn.Module):
    """Spatial, temporal and cross attention with residuals, Eq. (attnlayers)."""

    def __init__(self, lanes: int, config: AgentConfig) -> None:
        super().__init__()
        dim = config.d_token
        heads = config.heads
        length = config.history + 1
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
            scale = self.positions.shape[-1] ** -0.5
            self.positions.data[lane] = torch.randn(self.positions.shape[1:]) * scale

    def forward(
        self, clients: Tensor, history: Tensor, obs: Observation
    ) -> tuple[Tensor, Tensor | None]:
        """Return Xi `[R, B * V, d]` and the cross-attention weights `[R * B * h, H+1, V]`.

        Args:
            clients: Theta_cluster, client tokens.  # [R, B * V, d]
            history: Theta_history, tokens of global models.  # [R, B * T, d]
            obs: for its masks.
        """
        lanes, rounds, length = obs.history_mask.shape
        if self.spatial is not None:
            padding = ~obs.mask.view(lanes * rounds, -1, 1) * BLOCKED  # [R * B, V, 1]
            clients = self.spatial(clients, padding)
        if self.temporal is None or self.cross is None:
            return clients, None
        missing = ~obs.history_mask.view(lanes * rounds, length, 1) * BLOCKED  # [R * B, S, 1]
        positions = self.positions.transpose(1, 2)  # [R, 1, T, d]
        by_round = history.view(lanes, rounds, length, -1) + positions
        # Theta_temporal: every round sees itself and older rounds that exist.
        past = self.temporal(by_round.view(history.shape), missing + self.causal)
        xi, weights = self.cross(clients, past, missing)
        return xi, weights


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
        count = mask.sum(dim=2, keepdim=True).clamp_min(1)  # [R, B, 1]
        share = (mask / count).unsqueeze(2)  # [R, B, 1, V]
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
    means = torch.bmm(share.flatten(0, 1), by_set)  # [R * B, 1, d]
    return means.view(lanes, rounds, -1)


class IdentityTable(nn.Module):
    """Identity-aware embedding, Eq. (idemb): one trainable vector per client of each lane."""

    def __init__(self, lanes: int, num_clients: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(lanes, num_clients, dim))
        self.norm = LaneNorm(lanes, dim)

    def draw_identities(self, lane: int, seed: int) -> None:
        """Draw the first values of a lane; those of a client depend on the seed and its id only."""
        _, rows, dim = self.weight.shape
        blocks: list[Tensor] = []
        for block in range(math.ceil(rows / _IDENTITY_BLOCK)):
            draw = rng.generator(seed, "identity", block)
            blocks.append(torch.randn(_IDENTITY_BLOCK, dim, generator=draw))
        self.weight.data[lane] = torch.cat(blocks)[:rows]

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids `[R, n]` -> `[R, n, dim]`, each lane by its own table."""
        lanes, rows, _ = self.weight.shape
        first_rows = rows * torch.arange(lanes, device=ids.device).unsqueeze(1)  # [R, 1]
        tables = self.weight.flatten(0, 1)  # [R * N, dim]
        vectors = F.embedding(first_rows + ids, tables)
        embedded: Tensor = self.norm(vectors)
        return embedded


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
            if self.identity is not None:
                self.identity.draw_identities(lane, seed)
            with rng.isolated(seed, "qnet"):
                _draw_in_order(self, lane)
        self.to(device)
        self.rows = _joined(self)  # [R, P] all parameters of a lane side by side

    def forward(self, obs: Observation) -> tuple[Tensor, Tensor | None]:
        """Return Q and the cross-attention weights of what the agents saw.

        Returns:
            Q `[R, B, V, C]`, C being 1 unless there is one for each class, of no meaning in padded
            slots; and weights `[R * B * heads, H+1, V]`, or None without a cross-attention.
        """
        features = obs.clients.flatten(1, 2)  # [R, B * V, F]
        sketches = obs.history.flatten(1, 2)  # [R, B * T, D]
        clients, history = self.encoder(features, sketches)
        xi, weights = self.mixer(clients, history, obs)
        identity = None
        if self.identity is not None:
            identity = self.identity(obs.ids.flatten(1))  # [R, B * V, d_emb]
        q = self.heads(xi, identity, obs.mask)
        return q, weights

    def histogram(self, obs: Observation) -> Tensor:
        """Predict the class histogram of the current global model from its token `[R, B, C]`."""
        assert self.histogram_head is not None
        shares: Tensor = self.histogram_head(self.encoder.globals(obs.history[:, :, -1]))
        return shares.softmax(dim=-1)

    def lane_weights(self, lane: int) -> dict[str, Tensor]:
        """Return copies of the parameters of one lane by name, on the CPU."""
        weights: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            weights[name] = parameter.detach()[lane].cpu().clone()
        return weights

    @torch.no_grad()
    def load_lane_weights(self, lane: int, weights: dict[str, Tensor]) -> None:
        """Take over the parameters of one lane, named as in `lane_weights`."""
        for name, parameter in self.named_parameters():
            parameter[lane] = weights[name].view(parameter.shape[1:])


def _joined(net: nn.Module) -> Tensor:
    """Move all parameters `[R, *shape]` into one matrix `[R, P]` and leave views of it behind."""
    parameters = list(net.parameters())
    flat = [parameter.data.flatten(1) for parameter in parameters]
    rows = torch.cat(flat, dim=1)
    widths = [parameter.shape[1] for parameter in flat]
    for parameter, columns in zip(parameters, rows.split(widths, dim=1), strict=True):
        parameter.data = columns.view(parameter.shape)
    return rows


def _draw_in_order(module: nn.Module, lane: int) -> None:
    """Draw a lane's weights, those of inner layers first."""
    for layer in module.children():
        _draw_in_order(layer, lane)
    if isinstance(module, LaneLinear | SpatioTemporal):
        module.draw_weights(lane)
