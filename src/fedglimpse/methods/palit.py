"""Palit's trust-aware aggregation: anomalies lower trust, a DQN turns each client down or up.

Palit, arXiv 2510.01261, and its public code. For every client that took part, from left to right:

    anomaly A, contribution c     trust tau <- clip(tau (1 - .3 A + .2 c), .01, 1)
    L = .7 A + .3 (1 - c)         belief b <- clip(.8 L b / (L b + (1 - L)(1 - b)) + .2 b, .01, .99)
    gain g <- g (1 - .5 b) by "down", g (1 + .2 (1 - b)) by "up", in [.01, 2]     weights ~ g tau

Deviations from that code are numbered in docs/methods/palit.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedglimpse.aggregate import WeightedDelta, weighted_delta
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom, require
from fedglimpse.methods.trust import FEATURES, Trust
from fedglimpse.rl.action_q import ActionAgent
from fedglimpse.types import Method, Outcome, Update


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
