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

LOG_SIGMA = (-5.0, 1.0)  # bounds of the actor's log standard deviation
FIRST_LOG_SIGMA = -1.0  # about where it starts: gentle exploration around equal numbers


class ActorCritic(nn.Module):
    """Mean and spread of every client's number, and the value of the round."""

    def __init__(self, features: int, hidden: int, seed: int) -> None:
        """Build with weights drawn from `seed` alone."""
        super().__init__()
        with rng.isolated(seed, "ppo"):
            self.actor = nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, 2))
            self.reader = nn.Sequential(nn.Linear(features, hidden), nn.Tanh())
            self.critic = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        last = self.actor[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight.mul_(0.1)
            last.bias.copy_(torch.tensor([0.0, FIRST_LOG_SIGMA]))

    def forward(self, clients: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return mu `[B, K]`, log sigma `[B, K]` and values `[B]`.

        Args:
            clients: features.  # [B, K, F]
            mask: True for real clients.  # [B, K]
        """
        mu, log_sigma = self.actor(clients).unbind(-1)
        read = self.reader(clients) * mask[..., None]  # [B, K, H]
        pooled = read.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp_min(1)
        value = self.critic(pooled).squeeze(-1)
        return mu, log_sigma.clamp(*LOG_SIGMA), value


class Step(NamedTuple):
    """One round."""

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
        self.seed, self.clip, self.gamma = seed, clip, gamma
        self.epochs, self.horizon = epochs, horizon
        self.net = ActorCritic(features, hidden, seed)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr, fused=True)
        self.steps: list[Step] = []
        self.loss: float | None = None  # of the last batch
        self.flops = 0  # since they were last read
        self._shape = (features, hidden)

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
        draws = [rng.generator(self.seed, "ppo-noise", round_num, i) for i in ids.tolist()]
        noise = torch.stack([torch.randn((), generator=draw) for draw in draws])  # [K]
        with torch.no_grad():
            mu, log_sigma, _ = self._read(clients[None])
        action = mu[0] + log_sigma[0].exp() * noise
        log_prob = float(log_density(action, mu[0], log_sigma[0]).sum())
        self.steps.append(Step(clients, action, log_prob, None))
        return action

    def reward(self, value: float) -> bool:
        """Say what the last round was worth; False where none waits for it."""
        waits = bool(self.steps) and self.steps[-1].reward is None
        if waits:
            self.steps[-1] = self.steps[-1]._replace(reward=value)
        return waits

    def learn(self, following: Tensor) -> None:
        """Take `epochs` steps on the stored rounds and forget them.

        Args:
            following: features of the round after them, whose value closes the returns.  # [K, F]
        """
        clients = pad_sequence([s.clients for s in self.steps], batch_first=True)  # [B, K, F]
        action = pad_sequence([s.action for s in self.steps], batch_first=True)  # [B, K]
        sizes = torch.tensor([len(s.action) for s in self.steps])
        mask = torch.arange(action.shape[1]) < sizes[:, None]  # [B, K]
        before = torch.tensor([s.log_prob for s in self.steps])  # [B]
        with torch.no_grad():
            rewards = [s.reward or 0.0 for s in self.steps]
            last = float(self._read(following[None])[2])
            returns = torch.tensor(discounted(rewards, last, self.gamma))  # [B]
            advantage = returns - self._read(clients, mask)[2]
            spread = advantage.std(correction=0).clamp_min(1e-8)
            advantage = (advantage - advantage.mean()) / spread
        for _ in range(self.epochs):
            mu, log_sigma, value = self._read(clients, mask, passes=3)
            after = log_density(action, mu, log_sigma).masked_fill(~mask, 0.0).sum(1)
            loss = clipped_loss(after - before, advantage, self.clip)
            loss = loss + 0.5 * F.mse_loss(value, returns)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
        self.steps, self.loss = [], float(loss.detach())

    def _read(
        self, clients: Tensor, mask: Tensor | None = None, passes: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the network and count its products; a backward pass is two more."""
        mask = torch.ones(clients.shape[:2], dtype=torch.bool) if mask is None else mask
        (sets, rows), (features, hidden) = mask.shape, self._shape
        each = 2 * features * hidden + 2 * hidden  # actor and reader
        self.flops += 2 * passes * sets * (rows * each + hidden * hidden + hidden)
        return self.net(clients, mask)

    def spent(self) -> int:
        """Return the FLOPs since the last call."""
        flops, self.flops = self.flops, 0
        return flops

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue: tensors and plain values, copied."""
        return deepcopy(
            {
                "net": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "steps": [step._asdict() for step in self.steps],
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        state = deepcopy(state)
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = [Step(**step) for step in state["steps"]]


def log_density(x: Tensor, mu: Tensor, log_sigma: Tensor) -> Tensor:
    """Return the log density of normal variables, without the constant."""
    return -0.5 * ((x - mu) / log_sigma.exp()).square() - log_sigma


def clipped_loss(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Return minus PPO's clipped objective, its Eq. (7), for `[B]` rounds."""
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


def discounted(rewards: list[float], last: float, gamma: float) -> list[float]:
    """Return every round's discounted return, given the value `last` of what follows."""
    returns = []
    for reward in reversed(rewards):
        last = reward + gamma * last
        returns.append(last)
    return returns[::-1]
