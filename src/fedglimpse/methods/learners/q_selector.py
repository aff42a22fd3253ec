"""What FAVOR, FLASH-RL and FedAgent share: choosing by a Q-network.

The network reads the last known models of all clients (`population_q.PopulationAgent`). The methods
differ in how they explore and in what they reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedglimpse.agent.explore import pick
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import Setting
from fedglimpse.methods.learners.population_q import PopulationAgent
from fedglimpse.types import Choice, Outcome, View


@dataclass(frozen=True)
class QOptions:
    """`options.*` of the Q-learner that FAVOR, FLASH-RL and FedAgent share."""

    features: int = option(0, "q, floats kept of a sketch; 0: min(100, N, sketch.size)", at_least=0)
    hidden: int = option(512, "units of the hidden layer", at_least=1)
    gamma: float = option(0.9, "discount", at_least=0, at_most=1)
    lr: float = option(0.001, "step size of Adam", above=0)
    buffer: int = option(1000, "rounds that are kept", at_least=2)
    batch: int = option(50, "rounds in a mini-batch", at_least=1)
    sync: int = option(10, "updates between two copies into the target network", at_least=1)
    epsilon: float = option(0.9, "share of exploration in the first round", at_least=0, at_most=1)
    epsilon_least: float = option(
        0.2, "share of exploration after epsilon_rounds", at_least=0, at_most=1
    )
    epsilon_rounds: int = option(500, "rounds in which exploration falls", at_least=1)

    def epsilon_at(self, step: int) -> float:
        """Return the share of exploration after so many rounds: it falls in a line."""
        progress = min(1.0, step / self.epsilon_rounds)
        return self.epsilon + (self.epsilon_least - self.epsilon) * progress

    def agent(self, setting: Setting, per_client: bool = False) -> PopulationAgent:
        """Build the agent for a population."""
        return PopulationAgent(
            num_clients=setting.num_clients,
            sketch_dim=setting.config.sketch.size,
            seed=setting.seed,
            features=self.features,
            hidden=self.hidden,
            gamma=self.gamma,
            lr=self.lr,
            buffer=self.buffer,
            batch=self.batch,
            sync=self.sync,
            per_client=per_client,
        )


class ClientRewards(Protocol):
    """How a method rewards a round."""

    def __call__(self, outcome: Outcome) -> Tensor:
        """Return the reward of each chosen client `[K]`."""


class PendingChoice(NamedTuple):
    """A choice that waits for the outcome of its round."""

    view: View
    k: int
    scores: Tensor  # [V]


class QSelector:
    """Chooses by Q, or a random set with probability epsilon."""

    needs = frozenset({"global_sketch", "reward"})
    learns_from = frozenset({"sketch"})

    def __init__(
        self, agent: PopulationAgent, options: QOptions, client_rewards: ClientRewards
    ) -> None:
        """Start without experience.

        Args:
            agent: scores and learns.
            options: of the exploration.
            client_rewards: the rewards of a round.
        """
        self.agent = agent
        self.options = options
        self.client_rewards = client_rewards
        self.step = 0  # rounds acted: the t of the epsilon schedule
        self._pending: PendingChoice | None = None

    def select(self, view: View, k: int) -> Choice:
        """Score the visible clients and choose among them only."""
        scores = self.agent.scores(view).double()
        epsilon = self.options.epsilon_at(self.step)
        self._pending = PendingChoice(view, k, scores)
        slots, behaviour = self.choose(scores, k, epsilon, view.rng)
        info = {
            "behaviour": behaviour,
            "epsilon": round(epsilon, 6),
        }
        return Choice(slots, info=info)

    def choose(
        self,
        scores: Tensor,
        k: int,
        epsilon: float,
        generator: torch.Generator,
    ) -> tuple[Tensor, str]:
        """Return the slots, and "greedy" or how they were explored."""
        picked = pick(scores, k, epsilon, "all", 0, generator)
        return picked.slots, picked.behaviour

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Remember the round and learn."""
        pending = self._pending
        if pending is None or pending.view.round_num != outcome.round_num:
            raise ValueError(f"feedback for round {outcome.round_num} without a choice in it")
        rewards = self.client_rewards(outcome)
        sketches = outcome.reports["sketch"]
        self.agent.remember(
            pending.view,
            pending.k,
            outcome.selected,
            rewards,
            sketches,
        )
        td_loss, flops = self.agent.learn(outcome.round_num)
        self.step += 1
        self._pending = None
        is_seen = self.agent.memory.latest > 0  # [N]
        metrics = {
            "mean_q": float(pending.scores.mean()),
            "q_spread": float(pending.scores.std(correction=0)),
            "clients_seen": float(is_seen.sum()),
            "server_flops": float(self.agent.flops + flops),
        }
        if td_loss is not None:
            metrics["td_loss"] = td_loss
        if len(rewards):
            metrics["agent_reward"] = float(rewards.mean())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return networks, memory and the position in the schedule."""
        return {
            "agent": self.agent.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.step = state["step"]
        self.agent.load_state_dict(state["agent"])
