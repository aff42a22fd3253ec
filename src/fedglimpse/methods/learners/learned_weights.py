"""What FedDRL and FedPPO share: random clients, whose weights an actor-critic sets after training.

One agent serves a lane: the aggregator acts with it and the selector's feedback rewards it. It is
saved once, in the selector's state.

    x_i = (loss of W^t, loss of W_i, n_i / sum n, log(1 + age))     weights = softmax(sample)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedglimpse.agent.inputs import finite
from fedglimpse.federation.aggregation import WeightedDelta, weighted_delta
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import Setting, UniformRandom
from fedglimpse.methods.learners.ppo import PPO
from fedglimpse.types import Outcome, Update

REWARDS = ("score", "losses")
TrustRule = Callable[[Tensor], Tensor]  # losses of the trained models [K] -> True where used [K]


@dataclass(frozen=True)
class WeightOptions:
    """`options.*` of the PPO learner that FedDRL and FedPPO share."""

    reward: str = option(
        "score",
        "proxy score; or losses: -(mean + largest - smallest), one round later",
        choices=REWARDS,
    )
    hidden: int = option(64, "units of a hidden layer", at_least=1)
    lr: float = option(0.0003, "step size of Adam", above=0)
    clip: float = option(0.2, "how far the probability ratio may leave 1", above=0)
    gamma: float = option(0.9, "discount", at_least=0, at_most=1)
    epochs: int = option(4, "passes over a batch", at_least=1)
    horizon: int = option(16, "rounds of a batch", at_least=1)


class WeightAgent:
    """The actor-critic, and when each client was last seen."""

    def __init__(self, setting: Setting, options: WeightOptions) -> None:
        """Start without experience."""
        self.by_losses = options.reward == "losses"
        self.ppo = PPO(
            features=4,
            seed=setting.seed,
            hidden=options.hidden,
            lr=options.lr,
            clip=options.clip,
            gamma=options.gamma,
            epochs=options.epochs,
            horizon=options.horizon,
        )
        self.last = torch.full((setting.num_clients,), -1)  # [N] round of the last participation
        self.round_num: int | None = None  # when it last acted
        self.metrics: dict[str, float] = {}  # of that round

    def weigh(self, update: Update, is_trusted: Tensor) -> Tensor:
        """Return weights that sum to one over the trusted clients `[K]`, zero elsewhere."""
        self.round_num = update.round_num
        self.metrics = {}
        if self.by_losses:  # the losses of this round are the result of the last action
            self.reward(loss_reward(update.reports["loss"]))
        features = self._features(update)
        self.last[update.ids] = update.round_num
        ids = update.ids[is_trusted]
        logits = self.ppo.act(features[is_trusted], ids, update.round_num)
        weights = torch.zeros(len(update.ids), dtype=torch.float64)
        weights[is_trusted] = logits.double().softmax(dim=0)
        num_filtered = (~is_trusted).sum()
        concentration = weights.square().sum()
        self.metrics["filtered"] = float(num_filtered)
        self.metrics["effective_clients"] = float(1 / concentration)
        self.metrics["server_flops"] = float(self.ppo.spent())
        if self.ppo.loss is not None:
            self.metrics["ppo_loss"] = self.ppo.loss
            self.ppo.loss = None
        return weights

    def _features(self, update: Update) -> Tensor:
        """Return x_i of the clients of an update `[K, 4]`."""
        rounds_away = update.round_num - 1 - self.last[update.ids]
        columns = [
            update.reports["loss"],
            update.reports["loss_after"],
            update.sizes / update.sizes.sum(),
            rounds_away.clamp_min(0).log1p(),
        ]
        features = torch.stack([column.float() for column in columns], dim=1)
        return finite(features)

    def reward(self, value: float) -> None:
        """Pass a reward on to the learner; one that is not a number would spoil its networks."""
        if math.isfinite(value) and self.ppo.reward(value):
            self.metrics["agent_reward"] = value

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue."""
        return {
            "ppo": self.ppo.state_dict(),
            "last": self.last.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.ppo.load_state_dict(state["ppo"])
        self.last = state["last"].clone()


class LearnedWeights(WeightedDelta):
    """Weighs updates as the agent says; the selector saves the agent."""

    needs = frozenset({"loss", "loss_after"})

    def __init__(self, agent: WeightAgent, trust: TrustRule) -> None:
        """Let `agent` weigh the updates that `trust` lets through."""
        self.agent = agent
        self.trust = trust

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        is_trusted = self.trust(update.reports["loss_after"])
        self.applied = self.agent.weigh(update, is_trusted)
        weighed = replace(update, weights=self.applied.to(state))
        return weighted_delta(state, weighed)


class RewardedRandom(UniformRandom):
    """Chooses at random, passes the reward on to the agent, and saves it."""

    def __init__(self, agent: WeightAgent) -> None:
        """Reward `agent`; a proxy score is needed only where it is the reward."""
        super().__init__()
        self.agent = agent
        self.needs = frozenset() if agent.by_losses else frozenset({"reward"})

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Reward the weights of this round, if there are any."""
        agent = self.agent
        if agent.round_num != outcome.round_num:
            return {}
        if not agent.by_losses:
            agent.reward(outcome.score)
        return agent.metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the agent, also for the aggregator."""
        return self.agent.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.agent.load_state_dict(state)


def loss_reward(losses: Tensor) -> float:
    """Return -(mean + largest - smallest): low and even losses are good."""
    values = losses.double()
    cost = values.mean() + values.max() - values.min()
    return -float(cost)


def everyone(losses: Tensor) -> Tensor:
    """Trust all clients `[K]`."""
    return torch.ones(len(losses), dtype=torch.bool)
