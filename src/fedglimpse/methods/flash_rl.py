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
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting
from fedglimpse.methods.learners.q_selector import QOptions, QSelector
from fedglimpse.types import Method, Outcome, Update


@dataclass(frozen=True)
class Options(QOptions):
    """`options.*` of FLASH-RL, besides those of its learner."""

    lr: float = option(0.01, "step size of Adam", above=0)
    memory: float = option(
        0.6, "lambda, share of the newest round in a reputation", at_least=0, at_most=1
    )


class Distances(WeightedDelta):
    """FedAvg's aggregation, which notes how far every uploaded model is from the new one."""

    round_num = -1  # of the last aggregation
    relative = torch.empty(0)  # [K] distances in that round, relative to the new model's norm

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        new_state = super().step(state, update)
        num_params = update.num_params
        uploaded = update.starts + update.deltas  # [K, d]
        differences = (uploaded - new_state)[:, :num_params]
        distances = differences.double().norm(dim=1)
        parameters = new_state[:num_params].double()
        norm = parameters.norm().clamp_min(1e-12)
        self.relative = (distances / norm).cpu()
        self.round_num = update.round_num
        return new_state


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
        self.memory = options.memory
        self.distances = distances
        self.score = 0.0  # of the last round
        num_clients = setting.num_clients
        equal = torch.ones(num_clients, dtype=torch.float64)
        self.reputation = equal / num_clients  # [N]

    def choose(
        self,
        scores: Tensor,
        k: int,
        epsilon: float,
        generator: torch.Generator,
    ) -> tuple[Tensor, str]:
        """Fill each slot at random with probability `epsilon`, else with the best client left."""
        best_first, _ = super().choose(scores, len(scores), 0.0, generator)
        remaining = best_first.tolist()
        slots: list[int] = []
        num_random = 0
        for _ in range(min(k, len(remaining))):
            rank = 0
            if torch.rand((), generator=generator) < epsilon:
                rank = int(torch.randint(len(remaining), (), generator=generator))
                num_random += 1
            slots.append(remaining.pop(rank))
        if num_random == 0:
            behaviour = "greedy"
        elif num_random == len(slots):
            behaviour = "explore"
        else:
            behaviour = "partial"
        return torch.tensor(slots), behaviour

    def judge(self, outcome: Outcome) -> Tensor:
        """Update and return the reputations of the clients that took part `[K]`."""
        ids = outcome.selected
        distances = self.distances
        is_of_round = distances.round_num == outcome.round_num
        if is_of_round and len(distances.relative) == len(ids):
            rose = outcome.score > self.score
            useful = usefulness(distances.relative, rose)
            old = self.reputation[ids]
            self.reputation[ids] = reputation(old, useful, 0.0, self.memory)
        self.score = outcome.score
        return self.reputation[ids]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `QSelector`, with reputations and the last score."""
        state = super().state_dict()
        state["reputation"] = self.reputation.clone()
        state["score"] = self.score
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        super().load_state_dict(state)
        self.reputation = state["reputation"].clone()
        self.score = state["score"]

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Learn, and also report the spread of reputations among all clients."""
        metrics = super().feedback(outcome)
        spread = self.reputation.std(correction=0)
        return {**metrics, "reputation_spread": float(spread)}


def build(setting: Setting) -> Method:
    """Return FLASH-RL."""
    distances = Distances()
    selector = FlashSelector(setting, setting.options(Options), distances)
    return Method(selector, distances)


INFO = MethodInfo(
    name="flash-rl",
    summary="Double DQN over last known models, rewarded by client reputations",
    source="Bouaziz et al. 2023",
    build=build,
)
