"""FAVOR: a deep Q-network scores clients from the last known models of all clients.

Wang, Kaplan, Niu and Li, "Optimizing Federated Learning on Non-IID Data with Reinforcement
Learning", INFOCOM 2020, read through public reproductions:

    state = (W^t, last W_i of every client), compressed     reward = Xi^(score - Omega) - 1
    Q: state -> 512 -> N, Double DQN; the K best visible clients are chosen

Assumptions and deviations are numbered in docs/methods/favor.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting
from fedglimpse.methods.learners.q_selector import QOptions, QSelector
from fedglimpse.types import Method, Outcome


@dataclass(frozen=True)
class Options(QOptions):
    """`options.*` of FAVOR, besides those of its learner."""

    base: float = option(64.0, "Xi of the reward", above=1)
    target: float = option(0.85, "Omega of the reward, the score that is worth 0")


def reward(score: float, base: float, target: float) -> float:
    """Return Xi^(score - Omega) - 1: steep near the target, and 0 there."""
    return float(base ** (score - target) - 1)


def favor_selector(setting: Setting, options: Options) -> QSelector:
    """Return the selector; all clients of a round have the same reward."""

    def client_rewards(outcome: Outcome) -> Tensor:
        value = reward(outcome.score, options.base, options.target)
        return torch.full((len(outcome.selected),), value)  # [K]

    return QSelector(options.agent(setting), options, client_rewards)


def build(setting: Setting) -> Method:
    """Return FAVOR."""
    return Method(favor_selector(setting, setting.options(Options)), WeightedDelta())


INFO = MethodInfo(
    name="favor",
    summary="Double DQN over the last known models of all clients",
    source="Wang et al. 2020",
    build=build,
    confidence="medium",
)
