"""What a server thinks of its clients: anomaly, contribution, trust, belief and gain.

The formulas of Palit, arXiv 2510.01261, and its public code; `methods/palit.py` uses them.

Palit's trust-aware aggregation: anomalies lower trust, a DQN turns each client down or up.

Palit, arXiv 2510.01261, and its public code. For every client that took part, from left to right:

    anomaly A, contribution c     trust tau <- clip(tau (1 - .3 A + .2 c), .01, 1)
    L = .7 A + .3 (1 - c)         belief b <- clip(.8 L b / (L b + (1 - L)(1 - b)) + .2 b, .01, .99)
    gain g <- g (1 - .5 b) by "down", g (1 + .2 (1 - b)) by "up", in [.01, 2]     weights ~ g tau

Deviations from that code are numbered in docs/methods/palit.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta, weighted_delta
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom, require
from fedglimpse.methods.learners.action_q import ActionAgent
from fedglimpse.types import Method, Outcome, Update

HOLD, DOWN, UP = range(3)
NORMS = 5  # past update norms of a client that are kept
FEATURES = 5  # of a client, see `Trust.features`


def directions(deltas: Tensor, model: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 - cosine to the summed updates, norms, and capped relative change `[K]` each.

    In float64: the square of a large update must not overflow.
    """
    deltas, model = deltas.double(), model.double()
    norms, total = deltas.norm(dim=1), deltas.sum(0)
    cosine = deltas @ total / (norms * total.norm()).clamp_min(1e-12)
    change = (norms / model.norm().clamp_min(1e-6)).clamp(max=1.0)
    return 1 - cosine.clamp(-1, 1), norms, change


def unusual(norms: Tensor, past: Tensor) -> Tensor:
    """Return min(1, z / 3) of norms `[K]` against past ones `[K, 5]`, NaN where there is none.

    Less than two past norms have no spread and say nothing.
    """
    known = ~past.isnan()
    count = known.sum(1).clamp_min(1)
    mean = past.nan_to_num().sum(1) / count
    spread = ((past - mean[:, None]).square().nan_to_num().sum(1) / count).sqrt()
    z = (norms - mean).abs() / (spread + 1e-6)
    return torch.where(known.sum(1) >= 2, (z / 3).clamp(max=1.0), 0.0)


def contribution(gain: float, weights: Tensor) -> Tensor:
    """Return c = min(1, max(0, gain) / max(.01, w)) `[K]`, the gain in percentage points."""
    return (max(0.0, gain) / weights.clamp_min(0.01)).clamp(max=1.0)


def new_trust(trust: Tensor, anomaly: Tensor, contributed: Tensor) -> Tensor:
    """Return trust after a round."""
    return (trust * (1 - 0.3 * anomaly + 0.2 * contributed)).clamp(0.01, 1.0)


def new_belief(belief: Tensor, anomaly: Tensor, contributed: Tensor) -> Tensor:
    """Return the belief that a client is harmful after a round, by Bayes and with inertia."""
    likelihood = 0.7 * anomaly + 0.3 * (1 - contributed)
    harmful, harmless = likelihood * belief, (1 - likelihood) * (1 - belief)
    posterior = harmful / (harmful + harmless).clamp_min(1e-6)
    return (0.8 * posterior + 0.2 * belief).clamp(0.01, 0.99)


def new_gain(gain: Tensor, belief: Tensor, actions: Tensor) -> Tensor:
    """Return gains after hold, down or up."""
    down = torch.where(actions == DOWN, gain * (1 - 0.5 * belief), gain)
    return torch.where(actions == UP, gain * (1 + 0.2 * (1 - belief)), down).clamp(0.01, 2.0)


class Deed(NamedTuple):
    """What the server did in a round and has not judged yet."""

    round_num: int
    ids: Tensor  # [K]
    anomaly: Tensor  # [K]
    weights: Tensor  # [K]
    state: Tensor  # [K, 5] features before
    actions: Tensor  # [K]


class Trust:
    """What the server thinks of every client, and the agent that acts on it."""

    TABLES = ("trust", "belief", "gain", "last", "norms")

    def __init__(
        self, clients: int, agent: ActionAgent, *, least: float, decay: float, cost: float
    ) -> None:
        """Start with full trust and no opinion.

        Args:
            clients: N.
            agent: decides on hold, down or up, from 5 features of a client.
            least: share of random actions in the end.
            decay: decisions after which exploration has fallen to 1/e.
            cost: of acting, times the share of clients not held.
        """
        self.agent, self.least, self.decay, self.cost = agent, least, decay, cost
        self.trust = torch.ones(clients, dtype=torch.float64)  # [N] tau
        self.belief = torch.full_like(self.trust, 0.5)  # [N] b
        self.gain = torch.ones_like(self.trust)  # [N] g
        self.last = torch.full((clients,), -1)  # [N] round of the last participation
        self.norms = torch.full((clients, NORMS), math.nan).double()  # [N, 5] newest last
        self.score: float | None = None
        self.deed: Deed | None = None

    @property
    def epsilon(self) -> float:
        """Share of random actions."""
        return self.least + (1 - self.least) * math.exp(-self.agent.count / self.decay)

    def features(self, ids: Tensor, anomaly: Tensor, now: int) -> Tensor:
        """Return what the network reads of each client `[K, 5]`."""
        age = (now - self.last[ids]) / max(1, now)
        rows = [self.belief[ids], self.trust[ids], self.gain[ids], age, anomaly]
        return torch.stack([row.float() for row in rows], dim=1)

    def weigh(self, update: Update, state: Tensor) -> Tensor:
        """Judge the updates, act on every client and return the weights `[K]`."""
        ids, cut, now = update.ids, update.num_params, update.round_num
        apart, norms, change = (
            part.cpu() for part in directions(update.deltas[:, :cut], state[:cut])
        )
        anomaly = ((apart + unusual(norms, self.norms[ids]) + change) / 3).clamp(max=1.0)
        self.norms[ids] = torch.cat([self.norms[ids, 1:], norms[:, None]], dim=1)
        features = self.features(ids, anomaly, now)
        actions = self.agent.act(features, ids, now, self.epsilon)
        self.gain[ids] = new_gain(self.gain[ids], self.belief[ids], actions)
        weights = self.gain[ids] * self.trust[ids]
        weights = weights / weights.sum()
        self.deed = Deed(now, ids, anomaly, weights, features, actions)
        return weights

    def judge(self, score: float, round_num: int) -> dict[str, float]:
        """Update trust and belief by what came of the round, and learn from it."""
        deed, before = self.deed, self.score
        self.deed, self.score = None, score
        if deed is None or deed.round_num != round_num:
            return {}
        ids, gained = deed.ids, 0.0 if before is None else 100 * (score - before)
        part = contribution(gained, deed.weights)
        self.trust[ids] = new_trust(self.trust[ids], deed.anomaly, part)
        self.belief[ids] = new_belief(self.belief[ids], deed.anomaly, part)
        self.last[ids] = deed.round_num
        acted = float((deed.actions != HOLD).double().mean())
        reward, epsilon = gained - self.cost * acted, self.epsilon
        after = self.features(ids, deed.anomaly, deed.round_num)
        worth = torch.full((len(ids),), reward)
        self.agent.add(state=deed.state, action=deed.actions, reward=worth, after=after)
        loss, flops = self.agent.learn(deed.round_num)
        metrics = {
            "epsilon": epsilon,
            "agent_reward": reward,
            "acted": acted,
            "anomaly": float(deed.anomaly.mean()),
            "trust": float(self.trust[ids].mean()),
            "belief": float(self.belief[ids].mean()),
            "server_flops": float(len(ids) * self.agent.flops + flops),
        }
        return metrics if loss is None else metrics | {"td_loss": loss}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue between two rounds."""
        tables = {name: getattr(self, name).clone() for name in self.TABLES}
        return {**tables, "score": self.score, "agent": self.agent.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for name in self.TABLES:
            setattr(self, name, state[name].clone())
        self.score = state["score"]
        self.agent.load_state_dict(state["agent"])


@dataclass(frozen=True)
class Options:
    """`options.*` of Palit's method."""

    hidden: int = 64
    gamma: float = 0.9
    lr: float = 0.001
    buffer: int = 10_000  # transitions, one for each client and round
    batch: int = 64
    sync: int = 100  # updates between two copies into the target network
    epsilon_least: float = 0.01
    epsilon_decay: float = 500.0  # decisions after which exploration has fallen to 1/e
    cost: float = 0.5  # of acting: times the share of clients not held

    def __post_init__(self) -> None:
        for name in ("hidden", "buffer", "batch", "sync"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("lr", "epsilon_decay"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")
        for name in ("gamma", "epsilon_least"):
            value = getattr(self, name)
            require(0 <= value <= 1, name, value, "a number from 0 to 1")


class TrustedWeights(WeightedDelta):
    """Weighs updates by gain and trust; keeps nothing itself."""

    def __init__(self, trust: Trust) -> None:
        """Ask `trust` in every round."""
        self.trust = trust

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        self.applied = self.trust.weigh(update, state)
        return weighted_delta(state, replace(update, weights=self.applied.to(state)))


class JudgedRandom(UniformRandom):
    """A random choice that passes the score on and keeps all there is to keep."""

    needs = frozenset({"reward"})

    def __init__(self, trust: Trust, num_params: int) -> None:
        """Judge by `trust`; the products of the anomaly cost operations on every parameter."""
        super().__init__()
        self.trust, self.flops = trust, 6 * num_params

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Judge the clients of this round."""
        metrics = self.trust.judge(outcome.score, outcome.round_num)
        flops = metrics.get("server_flops", 0.0) + len(outcome.selected) * self.flops
        return {**metrics, "server_flops": flops}

    def state_dict(self) -> dict[str, Any]:
        """What is thought of every client, also for the aggregator."""
        return self.trust.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.trust.load_state_dict(state)


def build(setting: Setting) -> Method:
    """Return Palit's method."""
    options = setting.options(Options)
    names = ("hidden", "gamma", "lr", "buffer", "batch", "sync")
    settings = {name: getattr(options, name) for name in names}
    trust = Trust(
        setting.num_clients,
        ActionAgent(FEATURES, 3, seed=setting.seed, **settings),
        least=options.epsilon_least,
        decay=options.epsilon_decay,
        cost=options.cost,
    )
    return Method(JudgedRandom(trust, setting.num_params), TrustedWeights(trust))


INFO = MethodInfo(
    name="palit",
    summary="trust from anomalies, and a DQN that turns clients down or up",
    source="Palit 2025",
    build=build,
)
