"""Palit's trust-aware aggregation: anomalies lower trust, a DQN turns each client down or up.

Palit, arXiv 2510.01261, and its public code. For every client that took part, from left to right:

    anomaly A, contribution c     trust tau <- clip(tau (1 - .3 A + .2 c), .01, 1)
    L = .7 A + .3 (1 - c)         belief b <- clip(.8 L b / (L b + (1 - L)(1 - b)) + .2 b, .01, .99)
    gain g <- g (1 - .5 b) by "down", g (1 + .2 (1 - b)) by "up", in [.01, 2]     weights ~ g tau

The formulas come first, then `Trust`, which keeps them for every client, then the method.
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
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom
from fedglimpse.methods.learners.action_q import ActionAgent
from fedglimpse.types import Method, Outcome, Update

HOLD = 0
DOWN = 1
UP = 2
STORED_NORMS = 5  # past update norms that are kept of a client
FEATURES = 5  # of a client, see `Trust.features`


def directions(deltas: Tensor, model: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return 1 - cosine to the summed updates, norms, and capped relative change `[K]` each.

    In float64: the square of a large update must not overflow.
    """
    deltas = deltas.double()
    norms = deltas.norm(dim=1)
    total = deltas.sum(0)
    product_of_norms = (norms * total.norm()).clamp_min(1e-12)
    cosine = deltas @ total / product_of_norms
    model_norm = model.double().norm().clamp_min(1e-6)
    change = (norms / model_norm).clamp(max=1.0)
    return 1 - cosine.clamp(-1, 1), norms, change


def unusual(norms: Tensor, past: Tensor) -> Tensor:
    """Return min(1, z / 3) of norms `[K]` against past ones `[K, 5]`, NaN where there is none.

    Less than two past norms have no spread: the answer is 0.
    """
    is_known = ~past.isnan()
    count = is_known.sum(1)
    divisor = count.clamp_min(1)
    mean = past.nan_to_num().sum(1) / divisor
    squares = (past - mean.unsqueeze(1)).square()
    variance = squares.nan_to_num().sum(dim=1) / divisor
    deviation = variance.sqrt() + 1e-6
    z = (norms - mean).abs() / deviation
    capped = (z / 3).clamp(max=1.0)
    return torch.where(count >= 2, capped, 0.0)


def contribution(score_gain: float, weights: Tensor) -> Tensor:
    """Return c = min(1, max(0, gain) / max(.01, w)) `[K]`, the gain in percentage points."""
    gain = max(0.0, score_gain)
    per_weight = gain / weights.clamp_min(0.01)
    return per_weight.clamp(max=1.0)


def new_trust(trust: Tensor, anomaly: Tensor, contributed: Tensor) -> Tensor:
    """Return trust after a round."""
    factor = 1 - 0.3 * anomaly + 0.2 * contributed
    return (trust * factor).clamp(0.01, 1.0)


def new_belief(belief: Tensor, anomaly: Tensor, contributed: Tensor) -> Tensor:
    """Return the belief that a client is harmful after a round, by Bayes and with inertia."""
    likelihood = 0.7 * anomaly + 0.3 * (1 - contributed)
    harmful = likelihood * belief
    harmless = (1 - likelihood) * (1 - belief)
    posterior = harmful / (harmful + harmless).clamp_min(1e-6)
    updated = 0.8 * posterior + 0.2 * belief
    return updated.clamp(0.01, 0.99)


def new_gain(gain: Tensor, belief: Tensor, actions: Tensor) -> Tensor:
    """Return gains after hold, down or up."""
    lowered = gain * (1 - 0.5 * belief)
    raised = gain * (1 + 0.2 * (1 - belief))
    acted = torch.where(actions == DOWN, lowered, gain)
    acted = torch.where(actions == UP, raised, acted)
    return acted.clamp(0.01, 2.0)


class WeighedRound(NamedTuple):
    """A round whose clients were weighed and whose score is not known yet."""

    round_num: int
    ids: Tensor  # [K]
    anomaly: Tensor  # [K]
    weights: Tensor  # [K]
    features: Tensor  # [K, 5] before the round was judged
    actions: Tensor  # [K]


class Trust:
    """Trust, belief and gain of every client, and the agent that acts on them."""

    TABLES = ("trust", "belief", "gain", "last", "norms")

    def __init__(
        self,
        num_clients: int,
        agent: ActionAgent,
        *,
        least: float,
        decay: float,
        cost: float,
    ) -> None:
        """Start with full trust in each of `num_clients`.

        Args:
            num_clients: N.
            agent: decides on hold, down or up, from 5 features of a client.
            least: share of random actions in the end.
            decay: decisions after which exploration has fallen to 1/e.
            cost: of acting, times the share of clients not held.
        """
        self.agent = agent
        self.least = least
        self.decay = decay
        self.cost = cost
        self.trust = torch.ones(num_clients, dtype=torch.float64)  # [N] tau
        self.belief = torch.full_like(self.trust, 0.5)  # [N] b
        self.gain = torch.ones_like(self.trust)  # [N] g
        self.last = torch.full((num_clients,), -1)  # [N] round of the last participation
        no_norms = torch.full((num_clients, STORED_NORMS), math.nan)
        self.norms = no_norms.double()  # newest last
        self.score: float | None = None  # of the last round
        self.weighed: WeighedRound | None = None

    @property
    def epsilon(self) -> float:
        """Share of random actions."""
        progress = self.agent.count / self.decay
        return self.least + (1 - self.least) * math.exp(-progress)

    def features(self, ids: Tensor, anomaly: Tensor, round_num: int) -> Tensor:
        """Return what the network reads of each client `[K, 5]`."""
        rounds_away = round_num - self.last[ids]
        columns = [
            self.belief[ids],
            self.trust[ids],
            self.gain[ids],
            rounds_away / max(1, round_num),
            anomaly,
        ]
        return torch.stack([column.float() for column in columns], dim=1)

    def weigh(self, update: Update, state: Tensor) -> Tensor:
        """Judge the updates, act on every client and return the weights `[K]`."""
        ids = update.ids
        anomaly = self._anomaly(update, state)
        features = self.features(ids, anomaly, update.round_num)
        actions = self.agent.act(features, ids, update.round_num, self.epsilon)
        gain = new_gain(self.gain[ids], self.belief[ids], actions)
        self.gain[ids] = gain
        weights = gain * self.trust[ids]
        weights = weights / weights.sum()
        self.weighed = WeighedRound(
            round_num=update.round_num,
            ids=ids,
            anomaly=anomaly,
            weights=weights,
            features=features,
            actions=actions,
        )
        return weights

    def _anomaly(self, update: Update, state: Tensor) -> Tensor:
        """Return A of the updates `[K]`, and remember their norms."""
        ids = update.ids
        num_params = update.num_params
        deltas = update.deltas[:, :num_params]
        divergence, norms, change = directions(deltas, state[:num_params])
        norms = norms.cpu()
        past_norms = self.norms[ids]  # [K, 5]
        newest = norms.unsqueeze(1)
        self.norms[ids] = torch.cat([past_norms[:, 1:], newest], dim=1)
        total = divergence.cpu() + unusual(norms, past_norms) + change.cpu()
        return (total / 3).clamp(max=1.0)

    def judge(self, score: float, round_num: int) -> dict[str, float]:
        """Update trust and belief by the score of the round, and learn from it."""
        weighed = self.weighed
        last_score = self.score
        self.weighed = None
        self.score = score
        if weighed is None or weighed.round_num != round_num:
            return {}
        ids = weighed.ids
        score_gain = 0.0 if last_score is None else 100 * (score - last_score)
        contributed = contribution(score_gain, weighed.weights)
        trust = self.trust[ids]
        belief = self.belief[ids]
        self.trust[ids] = new_trust(trust, weighed.anomaly, contributed)
        self.belief[ids] = new_belief(belief, weighed.anomaly, contributed)
        self.last[ids] = round_num
        metrics = {
            "epsilon": self.epsilon,
            "anomaly": float(weighed.anomaly.mean()),
            "trust": float(self.trust[ids].mean()),
            "belief": float(self.belief[ids].mean()),
        }
        return metrics | self._learn(weighed, score_gain)

    def _learn(self, weighed: WeighedRound, score_gain: float) -> dict[str, float]:
        """Let the agent learn from a round that was judged; returns metrics."""
        has_acted = weighed.actions != HOLD
        acted = float(has_acted.double().mean())
        reward = score_gain - self.cost * acted
        features_after = self.features(weighed.ids, weighed.anomaly, weighed.round_num)
        self.agent.add(
            state=weighed.features,
            action=weighed.actions,
            reward=torch.full((len(weighed.ids),), reward),
            after=features_after,
        )
        loss, flops = self.agent.learn(weighed.round_num)
        of_choosing = len(weighed.ids) * self.agent.flops
        metrics = {
            "agent_reward": reward,
            "acted": acted,
            "server_flops": float(flops + of_choosing),
        }
        if loss is not None:
            metrics["td_loss"] = loss
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue between two rounds."""
        state = {name: getattr(self, name).clone() for name in self.TABLES}
        state["score"] = self.score
        state["agent"] = self.agent.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for name in self.TABLES:
            setattr(self, name, state[name].clone())
        self.score = state["score"]
        self.agent.load_state_dict(state["agent"])


@dataclass(frozen=True)
class Options:
    """`options.*` of Palit's method."""

    hidden: int = option(64, "units of a hidden layer", at_least=1)
    gamma: float = option(0.9, "discount", at_least=0, at_most=1)
    lr: float = option(0.001, "step size of Adam", above=0)
    buffer: int = option(
        10_000, "transitions that are kept, one for each client and round", at_least=1
    )
    batch: int = option(64, "transitions in a mini-batch", at_least=1)
    sync: int = option(100, "updates between two copies into the target network", at_least=1)
    epsilon_least: float = option(0.01, "share of random actions in the end", at_least=0, at_most=1)
    epsilon_decay: float = option(
        500.0, "decisions after which exploration has fallen to 1/e", above=0
    )
    cost: float = option(0.5, "of acting: times the share of clients not held")


class TrustedWeights(WeightedDelta):
    """Weighs updates by gain and trust."""

    def __init__(self, trust: Trust) -> None:
        """Use `trust`, which the selector saves."""
        self.trust = trust

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        self.applied = self.trust.weigh(update, state)
        weighed = replace(update, weights=self.applied.to(state))
        return weighted_delta(state, weighed)


class JudgedRandom(UniformRandom):
    """Chooses at random, passes the score on to `Trust`, and saves it."""

    needs = frozenset({"reward"})

    def __init__(self, trust: Trust, num_params: int) -> None:
        """Judge by `trust` updates of `num_params` parameters."""
        super().__init__()
        self.trust = trust
        self.flops_per_client = 6 * num_params  # three inner products in `directions`

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Judge the clients of this round."""
        metrics = self.trust.judge(outcome.score, outcome.round_num)
        of_learning = metrics.get("server_flops", 0.0)
        of_judging = len(outcome.selected) * self.flops_per_client
        metrics["server_flops"] = of_learning + of_judging
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `Trust`, also for the aggregator."""
        return self.trust.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.trust.load_state_dict(state)


def build(setting: Setting) -> Method:
    """Return Palit's method."""
    options = setting.options(Options)
    agent = ActionAgent(
        features=FEATURES,
        actions=3,
        seed=setting.seed,
        hidden=options.hidden,
        gamma=options.gamma,
        lr=options.lr,
        buffer=options.buffer,
        batch=options.batch,
        sync=options.sync,
    )
    trust = Trust(
        setting.num_clients,
        agent,
        least=options.epsilon_least,
        decay=options.epsilon_decay,
        cost=options.cost,
    )
    selector = JudgedRandom(trust, setting.num_params)
    return Method(selector, TrustedWeights(trust))


INFO = MethodInfo(
    name="palit",
    summary="trust from anomalies, and a DQN that turns clients down or up",
    source="Palit 2025",
    build=build,
)
