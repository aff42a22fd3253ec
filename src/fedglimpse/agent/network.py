"""The spatio-temporal attention Q-network: one Q-value for every visible client.

The paper's Sec. "Spatio-Temporal Attention-based Q-Network", for any number of clients.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.agent.attention import SpatioTemporal, pooled, shares
from fedglimpse.agent.config import AgentConfig
from fedglimpse.agent.identity import build_identity
from fedglimpse.agent.inputs import Observation


class Encoder(nn.Module):
    """f_enc: features to tokens by Linear, GELU, LayerNorm; shared by clients and globals.

    In mode `scalar` a client has three features and a global model D, so each has its own Linear
    into the shared rest; otherwise even the Linear is shared.
    """

    def __init__(self, features: int, sketch_dim: int, dim: int, shared: bool) -> None:
        super().__init__()
        self.client_input = nn.Linear(features, dim)
        self.global_input = None if shared else nn.Linear(sketch_dim, dim)
        self.norm = nn.LayerNorm(dim)

    def clients(self, features: Tensor) -> Tensor:
        """Return client tokens `[..., d]`."""
        return self.norm(F.gelu(self.client_input(features)))

    def globals(self, sketches: Tensor) -> Tensor:
        """Return tokens `[..., d]` of global models."""
        layer = self.global_input or self.client_input
        return self.norm(F.gelu(layer(sketches)))


class Dueling(nn.Module):
    """Value of the round plus centred advantages of clients (paper, "Dueling Q-Value ...")."""

    def __init__(self, dim: int, identity: int, outputs: int, context: bool) -> None:
        """Build both heads.

        Args:
            dim: d_token.
            identity: d_emb, zero without identities.
            outputs: 1, or C for one Q per class.
            context: let the advantage also read the pooled visible set, as the release does.
        """
        super().__init__()
        hidden = max(dim // 2, 8)
        self.value_input = nn.Linear(dim, hidden)
        self.value_identity = nn.Linear(identity, hidden, bias=False) if identity else None
        self.value_output = nn.Linear(hidden, outputs)
        self.advantage_input = nn.Linear(dim, hidden)
        self.advantage_identity = nn.Linear(identity, hidden, bias=False) if identity else None
        self.advantage_context = nn.Linear(dim, hidden, bias=False) if context else None
        self.advantage_output = nn.Linear(hidden, outputs)

    def forward(self, xi: Tensor, identity: Tensor, mask: Tensor) -> Tensor:
        """Return Q `[B, V, outputs]`: Val(mean xi, mean e) + Adv(xi_i, e(i)) - mean Adv.

        A Linear on concatenated inputs is written as a sum of Linears on its parts: what is the
        same for a whole set is computed once.

        Args:
            xi: client tokens.  # [V, B, d]
            identity: e of every client.  # [V, B, d_emb]
            mask: True for real clients.  # [B, V]
        """
        mean = shares(mask)  # [B, V]
        cluster = pooled(xi, mean)  # [B, d]
        value = self.value_input(cluster)
        advantage = self.advantage_input(xi)
        if self.value_identity is not None and self.advantage_identity is not None:
            value = value + self.value_identity(pooled(identity, mean))
            advantage = advantage + self.advantage_identity(identity)
        if self.advantage_context is not None:
            advantage = advantage + self.advantage_context(cluster)
        value = self.value_output(F.gelu(value))  # [B, outputs]
        advantage = self.advantage_output(F.gelu(advantage))  # [V, B, outputs]
        return (advantage + (value - pooled(advantage, mean))).transpose(0, 1)


class QNetwork(nn.Module):
    """Q-values of visible clients from their features, identities and the global history."""

    def __init__(
        self, config: AgentConfig, *, features: int, sketch_dim: int, num_classes: int, seed: int
    ) -> None:
        """Build with weights drawn from `seed` alone.

        Args:
            config: the architecture; see `AgentConfig`.
            features: F, features of a client.
            sketch_dim: D, floats of a global sketch.
            num_classes: C, for per-class Q and the auxiliary head.
            seed: of the run.
        """
        super().__init__()
        dim, length = config.d_token, config.history + 1
        self.per_class = config.q_output == "per_class"
        self.identity = build_identity(config.identity, config.identity_dim, seed)
        with rng.isolated(seed, "qnet"):
            self.encoder = Encoder(features, sketch_dim, dim, shared=config.reads_sketches)
            self.mixer = SpatioTemporal(
                dim, config.heads, length, config.spatial_attention, config.temporal_attention
            )
            outputs = num_classes if self.per_class else 1
            self.heads = Dueling(dim, self.identity.dim, outputs, config.advantage_context)
            self.histogram_head = nn.Linear(dim, num_classes) if config.aux_weight > 0 else None

    def forward(self, obs: Observation) -> Tensor:
        """Return Q `[B, V]`, or `[B, V, C]` per class. Padded slots hold values of no meaning."""
        return self.explain(obs)[0]

    def explain(self, obs: Observation) -> tuple[Tensor, Tensor | None]:
        """Return Q and the cross-attention weights `[B * heads, H+1, V]`, if there are any."""
        cluster = self.encoder.clients(obs.clients).transpose(0, 1).contiguous()  # [V, B, d]
        history = self.encoder.globals(obs.history).transpose(0, 1).contiguous()  # [H+1, B, d]
        xi, weights = self.mixer(cluster, obs.mask, history, obs.history_mask)
        q = self.heads(xi, self.identity(obs.ids.t()), obs.mask)  # [B, V, 1 or C]
        return (q if self.per_class else q.squeeze(-1)), weights

    def histogram(self, obs: Observation) -> Tensor:
        """Predict the class histogram of the current global model from its token `[B, C]`."""
        if self.histogram_head is None:
            raise ValueError("the network has no auxiliary head: agent.aux_weight is 0")
        return self.histogram_head(self.encoder.globals(obs.history[:, -1])).softmax(dim=-1)
