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
from fedglimpse.methods.base import Setting, UniformRandom, one_of, require
from fedglimpse.methods.learners.ppo import PPO
from fedglimpse.types import Outcome, Update

Trusted = Callable[[Tensor], Tensor]  # losses of the trained models [K] -> True where used [K]


@dataclass(frozen=True)
class WeightOptions:
    """`options.*` of the PPO learner that FedDRL and FedPPO share."""

    reward: str = "score"  # proxy score; or losses: -(mean + largest - smallest), one round later
    hidden: int = 64
    lr: float = 0.0003
    clip: float = 0.2
    gamma: float = 0.9
    epochs: int = 4
    horizon: int = 16  # rounds of a batch

    def __post_init__(self) -> None:
        one_of("reward", self.reward, "score", "losses")
        for name in ("hidden", "epochs", "horizon"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("lr", "clip"):
            require(getattr(self, name) > 0, name, getattr(self, name), "a number above 0")
        require(0 <= self.gamma <= 1, "gamma", self.gamma, "a number from 0 to 1")


class WeightAgent:
    """The actor-critic, and when each client was last seen."""

    def __init__(self, setting: Setting, options: WeightOptions) -> None:
        """Start without experience."""
        self.by_losses = options.reward == "losses"
        names = ("hidden", "lr", "clip", "gamma", "epochs", "horizon")
        settings = {name: getattr(options, name) for name in names}
        self.ppo = PPO(4, seed=setting.seed, **settings)
        self.last = torch.full((setting.num_clients,), -1)  # [N] round of the last participation
        self.round_num: int | None = None  # when it last acted
        self.metrics: dict[str, float] = {}  # of that round

    def weigh(self, update: Update, trusted: Tensor) -> Tensor:
        """Return weights that sum to one over the trusted clients `[K]`, zero elsewhere."""
        self.round_num, self.metrics = update.round_num, {}
        losses = update.reports["loss"]
        if self.by_losses:  # what the clients of this round say of what the last action led to
            self.reward(loss_reward(losses))
        age = (update.round_num - 1 - self.last[update.ids]).clamp_min(0).log1p()
        columns = [losses, update.reports["loss_after"], update.sizes / update.sizes.sum(), age]
        clients = finite(torch.stack([column.float() for column in columns], dim=1))  # [K, 4]
        self.last[update.ids] = update.round_num
        logits = self.ppo.act(clients[trusted], update.ids[trusted], update.round_num).double()
        weights = torch.zeros(len(update.ids), dtype=torch.float64)
        weights[trusted] = logits.softmax(0)
        self.metrics |= {
            "filtered": float((~trusted).sum()),
            "effective_clients": float(1 / weights.square().sum()),
            "server_flops": float(self.ppo.spent()),
        }
        if self.ppo.loss is not None:
            self.metrics["ppo_loss"], self.ppo.loss = self.ppo.loss, None
        return weights

    def reward(self, value: float) -> None:
        """Pass a reward on to the learner; one that is not a number would spoil its networks."""
        if math.isfinite(value) and self.ppo.reward(value):
            self.metrics["agent_reward"] = value

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""
        return {"ppo": self.ppo.state_dict(), "last": self.last.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.ppo.load_state_dict(state["ppo"])
        self.last = state["last"].clone()


class LearnedWeights(WeightedDelta):
    """Weighs updates as the agent says; keeps nothing itself."""

    needs = frozenset({"loss", "loss_after"})

    def __init__(self, agent: WeightAgent, trusted: Trusted) -> None:
        """Let `agent` weigh those updates that `trusted` lets through."""
        self.agent, self.trusted = agent, trusted

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        self.applied = self.agent.weigh(update, self.trusted(update.reports["loss_after"]))
        return weighted_delta(state, replace(update, weights=self.applied.to(state)))


class RewardedRandom(UniformRandom):
    """A random choice that passes the reward on and keeps the agent."""

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
        """The agent, also for the aggregator."""
        return self.agent.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.agent.load_state_dict(state)


def loss_reward(losses: Tensor) -> float:
    """Return -(mean + largest - smallest): low and even losses are good."""
    values = losses.double()
    return -float(values.mean() + values.max() - values.min())


def everyone(losses: Tensor) -> Tensor:
    """Trust all clients `[K]`."""
    return torch.ones(len(losses), dtype=torch.bool)
