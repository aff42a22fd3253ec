"""Proximal policy optimisation of one real number for each client of a set of any size.

Schulman, Wolski, Dhariwal, Radford and Klimov, "Proximal Policy Optimization Algorithms", 2017.
The actor reads one client at a time and the critic the mean over clients, so that neither the
order nor the number of clients matters.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fedglimpse import rng
from fedglimpse.errors import require

LOG_SIGMA = (-5.0, 1.0)  # bounds of the actor's log standard deviation
FIRST_LOG_SIGMA = -1.0  # about where it starts: gentle exploration around equal numbers


class ActorCritic(nn.Module):
    """Mean and spread of every client's number, and the value of the round."""

    def __init__(self, features: int, hidden: int, seed: int) -> None:
        """Build with weights drawn from `seed` alone."""
        super().__init__()
        with rng.isolated(seed, "ppo"):
            self.actor = _two_layers(features, hidden, 2)
            self.reader = nn.Sequential(
                nn.Linear(features, hidden),
                nn.Tanh(),
            )
            self.critic = _two_layers(hidden, hidden, 1)
        output = self.actor[-1]
        assert isinstance(output, nn.Linear)
        with torch.no_grad():
            output.weight.mul_(0.1)
            first_output = torch.tensor([0.0, FIRST_LOG_SIGMA])
            output.bias.copy_(first_output)

    def forward(
        self,
        clients: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return mu `[B, K]`, log sigma `[B, K]` and values `[B]`.

        Args:
            clients: features.  # [B, K, F]
            mask: True for real clients.  # [B, K]
        """
        mu, log_sigma = self.actor(clients).unbind(-1)
        hidden = self.reader(clients) * mask.unsqueeze(2)  # [B, K, H]
        count = mask.sum(dim=1, keepdim=True)  # [B, 1]
        mean = hidden.sum(dim=1) / count.clamp_min(1)
        value = self.critic(mean).squeeze(-1)
        return mu, log_sigma.clamp(*LOG_SIGMA), value


def _two_layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )


class ActedRound(NamedTuple):
    """A round in which the actor drew numbers for the clients."""

    clients: Tensor  # [K, F] features
    action: Tensor  # [K] the numbers that were drawn
    log_prob: float  # of all of them together
    reward: float | None  # None until it is known


class PPO:
    """Draws numbers for clients and learns from a reward for each round."""

    def __init__(
        self,
        features: int,
        *,
        seed: int,
        hidden: int = 64,
        lr: float = 3e-4,
        clip: float = 0.2,
        gamma: float = 0.9,
        epochs: int = 4,
        horizon: int = 16,
    ) -> None:
        """Start without experience.

        Args:
            features: F of a client.
            seed: of the run.
            hidden: units of every layer.
            lr: step size of Adam.
            clip: how far the probability ratio may leave 1.
            gamma: discount.
            epochs: passes over a batch.
            horizon: rounds of a batch.
        """
        self.seed = seed
        self.clip = clip
        self.gamma = gamma
        self.epochs = epochs
        self.horizon = horizon
        self.net = ActorCritic(features, hidden, seed)
        self.optimizer = torch.optim.Adam(
            self.net.parameters(),
            lr=lr,
            fused=True,
        )
        self.steps: list[ActedRound] = []
        self.loss: float | None = None  # of the last batch
        self.flops = 0  # since they were last read
        # Products of one client through actor and reader, and of one round through the critic.
        self._flops_per_client = 4 * features * hidden + 4 * hidden
        self._flops_per_round = 2 * (hidden * hidden + hidden)

    def act(self, clients: Tensor, ids: Tensor, round_num: int) -> Tensor:
        """Draw a number for every client `[K]`; learns first if a batch is complete.

        Every client has its own noise, so that the order of clients does not matter.

        Args:
            clients: features.  # [K, F]
            ids: their ids.  # [K]
            round_num: the current round.
        """
        self.steps = [step for step in self.steps if step.reward is not None]
        if len(self.steps) >= self.horizon:
            self.learn(clients)
        noise: list[Tensor] = []
        for client in ids.tolist():
            source = rng.generator(self.seed, "ppo-noise", round_num, client)
            noise.append(torch.randn((), generator=source))
        with torch.no_grad():
            mu, log_sigma, _ = self._read_one(clients)
        action = mu + log_sigma.exp() * torch.stack(noise)
        log_prob = log_density(action, mu, log_sigma).sum()
        require(
            bool(action.isfinite().all()),
            "The agent that sets the weights has diverged: its numbers are no longer finite; lower "
            "options.lr.",
            key="options.lr",
        )
        acted = ActedRound(
            clients=clients,
            action=action,
            log_prob=float(log_prob),
            reward=None,
        )
        self.steps.append(acted)
        return action

    def reward(self, value: float) -> bool:
        """Reward the last round; False where no round waits for its reward."""
        if not self.steps:
            return False
        last = self.steps[-1]
        is_waiting = last.reward is None
        if is_waiting:
            self.steps[-1] = last._replace(reward=value)
        return is_waiting

    def learn(self, following: Tensor) -> None:
        """Take `epochs` steps on the stored rounds and forget them.

        Args:
            following: features of the round after them, whose value closes the returns.  # [K, F]
        """
        all_clients = [step.clients for step in self.steps]
        all_actions = [step.action for step in self.steps]
        clients = pad_sequence(all_clients, batch_first=True)  # [B, K, F]
        action = pad_sequence(all_actions, batch_first=True)  # [B, K]
        old_log_prob = torch.tensor([step.log_prob for step in self.steps])  # [B]
        sizes = torch.tensor([len(step.action) for step in self.steps])
        slots = torch.arange(action.shape[1])
        mask = slots < sizes.unsqueeze(1)  # [B, K]
        with torch.no_grad():
            returns = self._returns(following)  # [B]
            _, _, old_value = self._read(clients, mask)
            advantage = returns - old_value
            spread = advantage.std(correction=0).clamp_min(1e-8)
            advantage = (advantage - advantage.mean()) / spread
        for _ in range(self.epochs):
            mu, log_sigma, value = self._read(clients, mask, passes=3)
            of_clients = log_density(action, mu, log_sigma).masked_fill(~mask, 0.0)
            log_ratio = of_clients.sum(dim=1) - old_log_prob  # [B]
            policy_loss = clipped_loss(log_ratio, advantage, self.clip)
            value_loss = F.mse_loss(value, returns)
            loss = policy_loss + 0.5 * value_loss
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        self.steps = []
        self.loss = float(loss.detach())

    def _returns(self, following: Tensor) -> Tensor:
        """Return the discounted return of every stored round `[B]`."""
        rewards = [step.reward or 0.0 for step in self.steps]
        _, _, value = self._read_one(following)
        returns = discounted(rewards, float(value), self.gamma)
        return torch.tensor(returns)

    def _read_one(self, clients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run the network on one round `[K, F]`: mu `[K]`, log sigma `[K]` and value `[]`."""
        rounds = clients.unsqueeze(0)  # [1, K, F]
        mask = torch.ones(rounds.shape[:2], dtype=torch.bool)
        mu, log_sigma, value = self._read(rounds, mask)
        return mu[0], log_sigma[0], value[0]

    def _read(
        self, clients: Tensor, mask: Tensor, passes: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the network and count its FLOPs; a backward pass is two more `passes`."""
        num_rounds, num_clients = mask.shape
        per_round = num_clients * self._flops_per_client + self._flops_per_round
        self.flops += passes * num_rounds * per_round
        return self.net(clients, mask)

    def spent(self) -> int:
        """Return the FLOPs since the last call."""
        flops = self.flops
        self.flops = 0
        return flops

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue: tensors and plain values, copied."""
        state = {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": [step._asdict() for step in self.steps],
        }
        return deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        state = deepcopy(state)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = [ActedRound(**step) for step in state["steps"]]


def log_density(x: Tensor, mu: Tensor, log_sigma: Tensor) -> Tensor:
    """Return the log density of normal variables, without the constant."""
    deviations = (x - mu) / log_sigma.exp()
    return -0.5 * deviations.square() - log_sigma


def clipped_loss(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return minus PPO's clipped objective, its Eq. (7), for `[B]` rounds."""
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)
    objective = torch.minimum(
        ratio * advantage,
        clipped_ratio * advantage,
    )
    return -objective.mean()


def discounted(rewards: list[float], value_after: float, gamma: float) -> list[float]:
    """Return every round's discounted return, given the value of what follows the last."""
    returns: list[float] = []
    value = value_after
    for reward in reversed(rewards):
        value = reward + gamma * value
        returns.append(value)
    return returns[::-1]
