"""The agent of one lane as simply as it can be written, to compare the running one with.

One round at a time, without padding, masks, lanes or batches: rounds that do not exist are left
out. Slow on purpose; `test_agent_parity.py` drives it beside `fedglimpse.agent`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.inputs import features_of, finite
from fedglimpse.agent.memory import Round
from fedglimpse.types import View


class Seen(NamedTuple):
    """One round as the agent saw it."""

    clients: Tensor  # [V, F]
    ids: Tensor  # [V]
    history: Tensor  # [T, D] the rounds that exist, newest last, T at most H+1


def attend(queries: Tensor, keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """Scaled dot-product attention as everyone writes it `[T, w]`; `allowed` is `[T, S]`."""
    scores = queries @ keys.t() / queries.shape[1] ** 0.5
    return scores.masked_fill(~allowed, -torch.inf).softmax(dim=1) @ values


class SelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)

    def forward(self, tokens: Tensor, causal: bool) -> Tensor:
        count, dim = tokens.shape
        allowed = torch.ones(count, count, dtype=torch.bool)
        allowed = allowed.tril() if causal else allowed
        by_head = self.qkv(tokens).view(count, self.heads, 3, dim // self.heads)
        gathered = [
            attend(by_head[:, h, 0], by_head[:, h, 1], by_head[:, h, 2], allowed)
            for h in range(self.heads)
        ]
        return tokens + torch.cat(gathered, dim=1)


class CrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)

    def forward(self, tokens: Tensor, context: Tensor) -> Tensor:
        width = tokens.shape[1] // self.heads
        queries = self.query(tokens).view(-1, self.heads, width)
        by_head = self.key_value(context).view(-1, self.heads, 2, width)
        allowed = torch.ones(len(tokens), len(context), dtype=torch.bool)
        gathered = [
            attend(queries[:, h], by_head[:, h, 0], by_head[:, h, 1], allowed)
            for h in range(self.heads)
        ]
        return tokens + torch.cat(gathered, dim=1)


class Encoder(nn.Module):
    def __init__(self, config: AgentConfig, sizes: AgentSizes) -> None:
        super().__init__()
        dim = config.d_token
        self.client_input = nn.Linear(sizes.features(config), dim)
        self.global_input = None if config.reads_sketches else nn.Linear(sizes.sketch_dim, dim)
        self.norm = nn.LayerNorm(dim)

    def clients(self, features: Tensor) -> Tensor:
        return self.norm(F.gelu(self.client_input(features)))

    def globals(self, sketches: Tensor) -> Tensor:
        layer = self.client_input if self.global_input is None else self.global_input
        return self.norm(F.gelu(layer(sketches)))


class Mixer(nn.Module):
    def __init__(self, config: AgentConfig) -> None:
        super().__init__()
        dim, heads = config.d_token, config.heads
        self.spatial = SelfAttention(dim, heads) if config.spatial_attention else None
        self.temporal = SelfAttention(dim, heads) if config.temporal_attention else None
        self.cross = CrossAttention(dim, heads) if config.temporal_attention else None
        if config.temporal_attention:
            self.positions = nn.Parameter(torch.empty(config.history + 1, 1, dim))

    def forward(self, clients: Tensor, history: Tensor) -> Tensor:
        if self.spatial is not None:
            clients = self.spatial(clients, causal=False)
        if self.temporal is None or self.cross is None:
            return clients
        positions = self.positions[-len(history) :, 0]
        return self.cross(clients, self.temporal(history + positions, causal=True))


class Heads(nn.Module):
    def __init__(self, config: AgentConfig, outputs: int) -> None:
        super().__init__()
        dim, hidden = config.d_token, max(config.d_token // 2, 8)
        has_identity = config.identity == "table"

        def of_identity() -> nn.Linear | None:
            return nn.Linear(config.identity_dim, hidden, bias=False) if has_identity else None

        self.value_input = nn.Linear(dim, hidden)
        self.value_identity = of_identity()
        self.value_output = nn.Linear(hidden, outputs)
        self.advantage_input = nn.Linear(dim, hidden)
        self.advantage_identity = of_identity()
        context = config.advantage_context
        self.advantage_context = nn.Linear(dim, hidden, bias=False) if context else None
        self.advantage_output = nn.Linear(hidden, outputs)

    def forward(self, xi: Tensor, identity: Tensor | None) -> Tensor:
        cluster = xi.mean(dim=0)
        value, advantage = self.value_input(cluster), self.advantage_input(xi)
        if self.value_identity is not None and self.advantage_identity is not None:
            assert identity is not None
            value = value + self.value_identity(identity.mean(dim=0))
            advantage = advantage + self.advantage_identity(identity)
        if self.advantage_context is not None:
            advantage = advantage + self.advantage_context(cluster)
        value = self.value_output(F.gelu(value))
        advantage = self.advantage_output(F.gelu(advantage))  # [V, outputs]
        return value + advantage - advantage.mean(dim=0)


class Identity(nn.Module):
    def __init__(self, clients: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(clients, dim))
        self.norm = nn.LayerNorm(dim)


class PlainQNetwork(nn.Module):
    """Parameters have the names of `QNetwork.lane_weights`."""

    def __init__(self, config: AgentConfig, sizes: AgentSizes, weights: dict[str, Tensor]) -> None:
        super().__init__()
        has_identity = config.identity == "table"
        self.identity = Identity(sizes.num_clients, config.identity_dim) if has_identity else None
        self.encoder = Encoder(config, sizes)
        self.mixer = Mixer(config)
        self.heads = Heads(config, sizes.outputs(config))
        has_head = config.aux_weight > 0
        self.histogram_head = nn.Linear(config.d_token, sizes.num_classes) if has_head else None
        self.load_state_dict(weights)

    def forward(self, seen: Seen) -> Tensor:
        """Return Q `[V, outputs]`."""
        xi = self.mixer(self.encoder.clients(seen.clients), self.encoder.globals(seen.history))
        if self.identity is None:
            return self.heads(xi, None)
        return self.heads(xi, self.identity.norm(self.identity.weight[seen.ids]))

    def histogram(self, seen: Seen) -> Tensor:
        """Predict the class histogram of the newest global model `[C]`."""
        assert self.histogram_head is not None
        return self.histogram_head(self.encoder.globals(seen.history[-1])).softmax(dim=0)


class PlainAgent:
    """An agent of one lane."""

    def __init__(
        self, config: AgentConfig, sizes: AgentSizes, seed: int, weights: dict[str, Tensor]
    ) -> None:
        self.config, self.seed = config, seed
        self.online = PlainQNetwork(config, sizes, weights)
        self.target = PlainQNetwork(config, sizes, weights)
        self.sketches: list[Tensor] = []  # of every round that was looked at
        self.rounds: list[Round] = []  # of every finished round; only the newest count
        plain, spared = [], []
        for name, parameter in self.online.named_parameters():
            is_spared = name == "identity.weight" and not config.identity_decay
            (spared if is_spared else plain).append(parameter)
        groups = [{"params": plain}, {"params": spared, "weight_decay": 0.0}]
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.SGD
        self.optimizer = kind(groups, lr=config.lr, weight_decay=config.weight_decay)

    def look(self, view: View) -> tuple[Seen, Tensor]:
        """Take in a view; return what was seen and the scores of the clients `[V]`."""
        self.sketches.append(finite(view.server["global_sketch"].float()))
        features = features_of(view, self.config.input, self.config.standardise)
        window = torch.stack(self.sketches[-self.config.history - 1 :])
        seen = Seen(features, view.ids, self.standardised(window))
        with torch.no_grad():
            return seen, self.score(self.online(seen))

    def score(self, q: Tensor) -> Tensor:
        """Rank clients by their Q `[V, outputs]`."""
        return q.mean(dim=1) if self.config.per_class_score == "mean" else q.amin(dim=1)

    def standardised(self, sketches: Tensor) -> Tensor:
        """Standardise sketches by all rounds of this run."""
        if not self.config.normalise_history:
            return sketches
        past = torch.stack(self.sketches).double()
        spread = past.std(dim=0, correction=0)
        factor = torch.where(spread > 1e-12, 1 / spread.clamp_min(1e-12), 0.0).float()
        return ((sketches - past.mean(dim=0).float()) * factor).clamp(-10, 10)

    def remembered(self, entry: int) -> Seen:
        """Rebuild what was seen in a round; overwritten rounds are missing in its history."""
        oldest = max(len(self.rounds) - self.config.buffer, 0)
        first = max(entry - self.config.history, oldest)
        window = torch.stack([r.sketch for r in self.rounds[first : entry + 1]])
        item = self.rounds[entry]
        return Seen(item.clients, item.ids, self.standardised(window))

    def target_of(self, entry: int) -> Tensor:
        """Return the n-step target of the transition that begins in a round `[outputs]`."""
        n, gamma = self.config.n_step, self.config.gamma
        with torch.no_grad():
            later = self.remembered(entry + n)
            scores = self.score(self.online(later))
            best = scores.argsort(descending=True)[: self.rounds[entry + n].k]
            y = gamma**n * self.target(later)[best].mean(dim=0)
            for step in range(n):
                y = y + gamma**step * self.rounds[entry + step].reward
        return y

    def learn(self, round_num: int) -> float | None:
        """Take the steps of a round; return the mean TD loss, None before there is enough."""
        config = self.config
        oldest = max(len(self.rounds) - config.buffer, 0)
        possible = range(oldest, max(len(self.rounds) - config.n_step, oldest))
        starts = [entry for entry in possible if self.rounds[entry].chosen.any()]
        if len(starts) < config.learn_start:
            return None
        orders = rng.shuffles(self.seed, "replay", round_num, config.updates_per_round, len(starts))
        batches = [[starts[i] for i in order[: config.batch_size]] for order in orders.tolist()]
        targets = {entry: self.target_of(entry) for batch in batches for entry in batch}
        losses = []
        for batch in batches:
            if not config.targets_once:
                targets = {entry: self.target_of(entry) for entry in batch}
            losses.append(self.step(batch, targets))
        return sum(losses) / len(losses)

    def step(self, entries: list[int], targets: dict[int, Tensor]) -> float:
        """Take one step on one mini-batch; return its TD loss."""
        loss_of = F.mse_loss if self.config.loss == "mse" else F.smooth_l1_loss
        td_losses, histogram_losses = [], []
        for entry in entries:
            seen, item = self.remembered(entry), self.rounds[entry]
            value = self.online(seen)[item.chosen].mean(dim=0)
            td_losses.append(loss_of(value, targets[entry]))
            if self.config.aux_weight and item.histogram.isfinite().all():
                histogram_losses.append(F.l1_loss(self.online.histogram(seen), item.histogram))
        td_loss = torch.stack(td_losses).mean()
        total = td_loss
        if histogram_losses:
            total = total + self.config.aux_weight * torch.stack(histogram_losses).mean()
        self.optimizer.zero_grad()
        total.backward()
        if self.config.grad_clip > 0:
            nn.utils.clip_grad_norm_(self.online.parameters(), self.config.grad_clip)
        self.optimizer.step()
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
            for follower, parameter in pairs:
                follower.lerp_(parameter, self.config.tau)
        return td_loss.item()
