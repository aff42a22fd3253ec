"""What FAVOR, FLASH-RL and FedAgent share: choosing by a Q over what was last seen of everybody.

The methods differ in how they explore and in what they reward; the learner is
`rl.population_q.PopulationAgent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fedglimpse.agent.explore import pick
from fedglimpse.methods.base import Setting, require
from fedglimpse.methods.learners.population_q import PopulationAgent
from fedglimpse.types import Choice, Outcome, View


@dataclass(frozen=True)
class QOptions:
    """`options.*` of the Q-learner that FAVOR, FLASH-RL and FedAgent share."""

    features: int = 0  # q, floats kept of a sketch; 0: min(100, N, sketch.size)
    hidden: int = 512
    gamma: float = 0.9
    lr: float = 0.001
    buffer: int = 1000  # rounds
    batch: int = 50  # rounds
    sync: int = 10  # updates between two copies into the target network
    epsilon: float = 0.9  # share of exploration in the first round
    epsilon_least: float = 0.2  # and in the last of
    epsilon_rounds: int = 500

    def __post_init__(self) -> None:
        require(self.features >= 0, "features", self.features, "0 or a number of floats")
        for name in ("hidden", "batch", "sync", "epsilon_rounds"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(self.buffer >= 2, "buffer", self.buffer, "2 or more rounds")
        require(self.lr > 0, "lr", self.lr, "a number above 0")
        for name in ("gamma", "epsilon", "epsilon_least"):
            value = getattr(self, name)
            require(0 <= value <= 1, name, value, "a number from 0 to 1")

    def epsilon_at(self, step: int) -> float:
        """Return the share of exploration after so many rounds: it falls in a line."""
        done = min(1.0, step / self.epsilon_rounds)
        return self.epsilon + (self.epsilon_least - self.epsilon) * done

    def agent(self, setting: Setting, per_client: bool = False) -> PopulationAgent:
        """Build the agent for a population."""
        names = ("features", "hidden", "gamma", "lr", "buffer", "batch", "sync")
        return PopulationAgent(
            num_clients=setting.num_clients,
            sketch_dim=setting.config.sketch.size,
            seed=setting.seed,
            per_client=per_client,
            **{name: getattr(self, name) for name in names},
        )


class Worth(Protocol):
    """How a method rewards a round."""

    def __call__(self, outcome: Outcome) -> Tensor:
        """Return the reward of each chosen client `[K]`."""


class QSelector:
    """Chooses by Q, or a random set with probability epsilon."""

    needs = frozenset({"global_sketch", "reward"})
    learns_from = frozenset({"sketch"})

    def __init__(self, agent: PopulationAgent, options: QOptions, worth: Worth) -> None:
        """Start without experience.

        Args:
            agent: scores and learns.
            options: of the exploration.
            worth: the rewards of a round.
        """
        self.agent, self.options, self.worth = agent, options, worth
        self.step = 0  # rounds acted: the t of the epsilon schedule
        self._pending: tuple[View, int, Tensor] | None = None

    def select(self, view: View, k: int) -> Choice:
        """Score the visible clients and choose among them only."""
        scores, eps = self.agent.look(view).double(), self.options.epsilon_at(self.step)
        self._pending = (view, k, scores)
        slots, behaviour = self.choose(scores, k, eps, view.rng)
        return Choice(slots, info={"behaviour": behaviour, "epsilon": round(eps, 6)})

    def choose(
        self, scores: Tensor, k: int, eps: float, generator: torch.Generator
    ) -> tuple[Tensor, str]:
        """Return the slots, and how they came about."""
        picked = pick(scores, k, eps, "all", 0, generator)
        return picked.slots, picked.behaviour

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Remember the round and learn."""
        if self._pending is None or self._pending[0].round_num != outcome.round_num:
            raise ValueError(f"feedback for round {outcome.round_num} without a choice in it")
        (view, k, scores), worth = self._pending, self.worth(outcome)
        self.agent.remember(view, k, outcome.selected, worth, outcome.reports["sketch"])
        td_loss, flops = self.agent.learn(outcome.round_num)
        self.step, self._pending = self.step + 1, None
        metrics = {
            "mean_q": float(scores.mean()),
            "q_spread": float(scores.std(correction=0)),
            "clients_seen": float((self.agent.memory.latest > 0).sum()),
            "server_flops": float(self.agent.flops + flops),
        }
        if td_loss is not None:
            metrics["td_loss"] = td_loss
        if len(worth):
            metrics["agent_reward"] = float(worth.mean())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Networks, memory and the position in the schedule."""
        return {"agent": self.agent.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.step = state["step"]
        self.agent.load_state_dict(state["agent"])
