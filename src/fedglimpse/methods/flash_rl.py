"""FLASH-RL: FAVOR's kind of Q-network, with a reputation of its own for every client as reward.

Bouaziz, Benmeziane, Imine, Hamdad, Niar and Ouarnoughi, "FLASH-RL: Federated Learning Addressing
System and Static Heterogeneity using Reinforcement Learning", ICCD 2023, and the code at
github.com/Sofianebouaziz1/FLASH-RL.

    delta_i = ||W_i - W^{t+1}|| / ||W^{t+1}||
    U_i = exp(-delta_i) if the score rose, else 1 - exp(-delta_i)
    R_i <- (1 - lambda) R_i + lambda (U_i - latency_i)       reward of i: R_i

Deviations from that code are numbered in docs/methods/flash-rl.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import MethodInfo, Setting, require
from fedglimpse.methods.learners.stored_features import QOptions, QSelector
from fedglimpse.types import Method, Outcome, Update


@dataclass(frozen=True)
class Options(QOptions):
    """`options.*` of FLASH-RL, besides those of its learner."""

    lr: float = 0.01
    memory: float = 0.6  # lambda, share of the newest round in a reputation

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.memory <= 1, "memory", self.memory, "a number from 0 to 1")


class Distances(WeightedDelta):
    """FedAvg's aggregation, which notes how far every uploaded model is from the new one."""

    last: tuple[int, Tensor] | None = None  # round, [K] relative distances; of one round only

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        fresh, cut = super().step(state, update), update.num_params
        apart = (update.starts + update.deltas - fresh)[:, :cut].double().norm(dim=1)
        relative = apart / fresh[:cut].double().norm().clamp_min(1e-12)
        self.last = (update.round_num, relative.cpu())
        return fresh


def usefulness(distance: Tensor, rose: bool) -> Tensor:
    """Return U: near the new model is good where the score rose, far from it where it fell."""
    near = torch.exp(-distance.abs())
    return near if rose else 1 - near


def reputation(old: Tensor, useful: Tensor, latency: Tensor | float, memory: float) -> Tensor:
    """Return (1 - lambda) R + lambda (U - latency), with latencies scaled to [0, 1]."""
    return (1 - memory) * old + memory * (useful - latency)


class FlashSelector(QSelector):
    """Explores slot by slot, and rewards each client with its reputation."""

    def __init__(self, setting: Setting, options: Options, distances: Distances) -> None:
        """Start with reputations of 1/N; all devices are alike, so that latencies are 0."""
        agent = options.agent(setting, per_client=True)
        super().__init__(agent, options, self.judge)
        self.memory, self.distances, self.score = options.memory, distances, 0.0
        clients = setting.num_clients
        self.reputation = torch.full((clients,), 1 / clients, dtype=torch.float64)  # [N]

    def choose(
        self, scores: Tensor, k: int, eps: float, generator: torch.Generator
    ) -> tuple[Tensor, str]:
        """Fill each slot at random with probability `eps`, else with the best client left."""
        left = super().choose(scores, len(scores), 0.0, generator)[0].tolist()  # best first
        slots, random = [], 0
        for _ in range(min(k, len(left))):
            explore = bool(torch.rand((), generator=generator) < eps)
            at = int(torch.randint(len(left), (), generator=generator)) if explore else 0
            slots.append(left.pop(at))
            random += explore
        behaviour = "greedy" if not random else "explore" if random == len(slots) else "partial"
        return torch.tensor(slots), behaviour

    def judge(self, outcome: Outcome) -> Tensor:
        """Update and return the reputations of those who took part `[K]`."""
        ids, last = outcome.selected, self.distances.last
        if last is not None and last[0] == outcome.round_num and len(last[1]) == len(ids):
            useful = usefulness(last[1], outcome.score > self.score)
            self.reputation[ids] = reputation(self.reputation[ids], useful, 0.0, self.memory)
        self.score = outcome.score
        return self.reputation[ids]

    def state_dict(self) -> dict[str, Any]:
        """As `QSelector`, with reputations and the last score."""
        own = {"reputation": self.reputation.clone(), "score": self.score}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        super().load_state_dict(state)
        self.reputation, self.score = state["reputation"].clone(), state["score"]

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """As `QSelector`, with the spread of reputations among all clients."""
        metrics = super().feedback(outcome)
        return {**metrics, "reputation_spread": float(self.reputation.std(correction=0))}


def build(setting: Setting) -> Method:
    """Return FLASH-RL."""
    distances = Distances()
    return Method(FlashSelector(setting, setting.options(Options), distances), distances)


INFO = MethodInfo(
    name="flash-rl",
    summary="Double DQN over last known models, rewarded by client reputations",
    source="Bouaziz et al. 2023",
    build=build,
)
