"""The spatio-temporal attention Q-network, for R lanes at once.

The paper's Sec. "Spatio-Temporal Attention-based Q-Network": one Q-value for every visible client,
for any number of clients. Every lane has its own weights, so every parameter has a first dimension
R (`layers.py`). All parameters are views of one matrix `rows` `[R, P]`, which an optimizer moves at
once (`learner.py`).

What a pass costs is counted from shapes at the end of this file: 2 FLOPs per multiply-add of a
product. A run meets few sizes of visible sets, so every count is made once and remembered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.layers import BLOCKED, CrossAttention, LaneLinear, LaneNorm, SelfAttention

_IDENTITY_BLOCK = 64  # identities that are drawn together


class Encoder(nn.Module):
    """f_enc: features to tokens by Linear, GELU, LayerNorm; shared by clients and global models.

    Clients that are seen by a few numbers have a Linear of their own into the shared rest.
    """

    def __init__(
        self,
        lanes: int,
        features: int,
        sketch_dim: int,
        dim: int,
        shared: bool,
    ) -> None:
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
            drawn = torch.randn(self.positions.shape[1:])
            self.positions.data[lane] = drawn * scale

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
        sets = lanes * rounds
        if self.spatial is not None:
            is_padding = ~obs.mask.view(sets, -1, 1)  # [R * B, V, 1]
            clients = self.spatial(clients, is_padding * BLOCKED)
        if self.temporal is None or self.cross is None:
            return clients, None
        is_missing = ~obs.history_mask.view(sets, length, 1)  # [R * B, S, 1]
        missing = is_missing * BLOCKED
        positions = self.positions.transpose(1, 2)  # [R, 1, T, d]
        by_round = history.view(lanes, rounds, length, -1)
        placed = (by_round + positions).view(history.shape)
        # Theta_temporal: every round sees itself and older rounds that exist.
        past = self.temporal(placed, missing + self.causal)
        xi, weights = self.cross(clients, past, missing)
        return xi, weights


class Dueling(nn.Module):
    """Value of the round plus centred advantages of clients (paper, "Dueling Q-Value ...")."""

    def __init__(
        self,
        lanes: int,
        dim: int,
        identity: int,
        outputs: int,
        context: bool,
    ) -> None:
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
        visible = mask.sum(dim=2, keepdim=True).clamp_min(1)  # [R, B, 1]
        share = (mask / visible).unsqueeze(2)  # [R, B, 1, V]
        sets = mask.shape[1:]  # B, V
        cluster = (share @ xi.unflatten(1, sets)).squeeze(2)  # [R, B, d]
        value = self.value_input(cluster)
        advantage = self.advantage_input(xi)  # [R, B * V, hidden]
        if self.value_identity is not None and self.advantage_identity is not None:
            assert identity is not None
            mean_identity = (share @ identity.unflatten(1, sets)).squeeze(2)
            value = self.value_identity(mean_identity, value)
            advantage = self.advantage_identity(identity, advantage)
        if self.advantage_context is not None:
            context = self.advantage_context(cluster).unsqueeze(2)  # [R, B, 1, hidden]
            by_set = advantage.unflatten(1, sets)  # [R, B, V, hidden]
            advantage = (by_set + context).flatten(1, 2)
        value = self.value_output(F.gelu(value))  # [R, B, outputs]
        advantage = self.advantage_output(F.gelu(advantage))  # [R, B * V, outputs]
        advantage_by_set = advantage.unflatten(1, sets)  # [R, B, V, outputs]
        mean_advantage = share @ advantage_by_set  # [R, B, 1, outputs]
        return advantage_by_set + (value.unsqueeze(2) - mean_advantage)


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
        identities = torch.cat(blocks)
        self.weight.data[lane] = identities[:rows]

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ids `[R, n]` -> `[R, n, dim]`, each lane by its own table."""
        lanes, rows, _ = self.weight.shape
        lane_numbers = torch.arange(lanes, device=ids.device)
        first_rows = rows * lane_numbers.unsqueeze(1)  # [R, 1] of each lane's table
        tables = self.weight.flatten(0, 1)  # [R * N, dim]
        vectors = F.embedding(first_rows + ids, tables)
        embedded: Tensor = self.norm(vectors)
        return embedded


class QNetwork(nn.Module):
    """Q-values of visible clients from their features, identities and the global history."""

    def __init__(
        self,
        config: AgentConfig,
        sizes: AgentSizes,
        seeds: Sequence[int],
        device: torch.device,
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
        self.encoder = Encoder(
            lanes,
            features,
            sizes.sketch_dim,
            dim,
            config.reads_sketches,
        )
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
        current = obs.history[:, :, -1]  # [R, B, D]
        tokens = self.encoder.globals(current)
        logits: Tensor = self.histogram_head(tokens)
        return logits.softmax(dim=-1)

    def lane_weights(self, lane: int) -> dict[str, Tensor]:
        """Return copies of the parameters of one lane by name, on the CPU."""
        weights: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            of_lane = parameter.detach()[lane]
            weights[name] = of_lane.cpu().clone()
        return weights

    @torch.no_grad()
    def load_lane_weights(self, lane: int, weights: dict[str, Tensor]) -> None:
        """Take over the parameters of one lane, named as in `lane_weights`."""
        for name, parameter in self.named_parameters():
            shape = parameter.shape[1:]
            parameter[lane] = weights[name].view(shape)


def _joined(net: nn.Module) -> Tensor:
    """Move all parameters `[R, *shape]` into one matrix `[R, P]` and leave views of it behind."""
    parameters = list(net.parameters())
    flat = [parameter.data.flatten(1) for parameter in parameters]
    rows = torch.cat(flat, dim=1)
    widths = [parameter.shape[1] for parameter in flat]
    columns_of_each = rows.split(widths, dim=1)
    for parameter, columns in zip(parameters, columns_of_each, strict=True):
        parameter.data = columns.view(parameter.shape)
    return rows


def _draw_in_order(module: nn.Module, lane: int) -> None:
    """Draw a lane's weights, those of inner layers first."""
    for layer in module.children():
        _draw_in_order(layer, lane)
    if isinstance(module, LaneLinear | SpatioTemporal):
        module.draw_weights(lane)


@cache
def forward_flops(config: AgentConfig, sizes: AgentSizes, sets: int, visible: int) -> int:
    """Count one forward pass of the Q-network.

    Args:
        config: the architecture.
        sizes: the sizes that it does not say.
        sets: B, visible sets in the batch.
        visible: V, padding included.
    """
    d = config.d_token
    length = config.history + 1
    clients = sets * visible
    outputs = sizes.outputs(config)
    client_tokens = clients * sizes.features(config) * d
    global_tokens = sets * length * sizes.sketch_dim * d
    total = client_tokens + global_tokens
    if config.spatial_attention:
        total += _attention(d, sets, visible, visible)
    if config.temporal_attention:
        total += _attention(d, sets, length, length)
        total += _attention(d, sets, visible, length)
    hidden = max(d // 2, 8)
    width = d if config.identity == "none" else d + config.identity_dim
    head = width * hidden + hidden * outputs
    total += (clients + sets) * head  # advantages of clients, values of sets
    if config.advantage_context:
        total += sets * d * hidden
    return 2 * total


def _attention(d: int, sets: int, rows: int, context: int) -> int:
    """Multiply-adds of one attention layer: projections, scores, weighted sum."""
    projections = rows * d * d + context * 2 * d * d
    scores_and_sum = 2 * rows * context * d
    return sets * (projections + scores_and_sum)


@cache
def update_flops(config: AgentConfig, sizes: AgentSizes, visible: int, visible_later: int) -> int:
    """Count what one transition of a mini-batch costs.

    Args:
        config: the architecture.
        sizes: the sizes that it does not say.
        visible: V of the observation that is learnt from; a backward pass is twice its forward.
        visible_later: V of the next observation, which both networks read.
    """
    now = forward_flops(config, sizes, 1, visible)
    later = forward_flops(config, sizes, 1, visible_later)
    return 3 * now + 2 * later
