"""Deep Q-learning of one of a few actions for each client, from that client's own features.

The learner is `double_dqn.py` with actions instead of clients: a row is one client, and its chosen
set is the one action it got.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse import rng
from fedglimpse.methods.learners.double_dqn import UPDATE_PASSES, CandidateDQN, ReplayBatch


class ClientObservation(NamedTuple):
    """One client in each row."""

    features: Tensor  # [B, F]
    mask: Tensor  # [B, A] True: every action can be taken


class ActionQ(nn.Module):
    """Q of every action, by two hidden layers."""

    def __init__(
        self,
        features: int,
        hidden: int,
        actions: int,
        seed: int,
    ) -> None:
        """Build with weights drawn from `seed` alone."""
        super().__init__()
        with rng.isolated(seed, "action-q"):
            self.layers = nn.Sequential(
                nn.Linear(features, hidden),
                nn.ReLU(),
                nn.Linear(hidden, hidden),
                nn.ReLU(),
                nn.Linear(hidden, actions),
            )

    def forward(self, obs: ClientObservation) -> Tensor:
        """Return Q `[B, A]`."""
        return self.layers(obs.features)


class ActionAgent:
    """Takes actions for clients and learns from (state, action, reward, next state)."""

    def __init__(
        self,
        features: int,
        actions: int,
        *,
        seed: int,
        hidden: int,
        gamma: float,
        lr: float,
        buffer: int,
        batch: int,
        sync: int,
    ) -> None:
        """Start without experience.

        Args:
            features: F of a client.
            actions: A.
            seed: of the run.
            hidden: units of both hidden layers.
            gamma: discount.
            lr: step size of Adam.
            buffer: transitions that are kept.
            batch: transitions in a mini-batch; with fewer stored ones nothing is learnt.
            sync: updates between two copies of the online into the target network.
        """
        self.seed = seed
        self.gamma = gamma
        self.batch = batch
        self.sync = sync
        self.actions = actions
        self.count = 0  # transitions that were ever stored
        self.updates = 0
        self.flops = 2 * hidden * (features + hidden + actions)  # of one client
        self.rows = {
            "state": torch.zeros(buffer, features),
            "action": torch.zeros(buffer, dtype=torch.int64),
            "reward": torch.zeros(buffer),
            "after": torch.zeros(buffer, features),
        }
        net = ActionQ(features, hidden, actions, seed)
        self.learner = CandidateDQN(
            net,
            lr=lr,
            grad_clip=1.0,
            loss="smooth_l1",
        )

    @torch.no_grad()
    def act(
        self,
        features: Tensor,
        ids: Tensor,
        round_num: int,
        epsilon: float,
    ) -> Tensor:
        """Return an action for every client `[K]`: the best one, or with `epsilon` a random one.

        Every client has its own draws, so that the order of clients does not matter.
        """
        q = self.learner.online(self._observe(features))  # [K, A]
        best = q.argmax(dim=1).tolist()
        actions: list[int] = []
        for client, best_action in zip(ids.tolist(), best, strict=True):
            source = rng.generator(self.seed, "action-q", round_num, client)
            explores = bool(torch.rand((), generator=source) < epsilon)
            if explores:
                drawn = torch.randint(self.actions, (), generator=source)
                actions.append(int(drawn))
            else:
                actions.append(best_action)
        return torch.tensor(actions)

    def add(self, **values: Tensor) -> None:
        """Store K transitions, `state`, `action`, `reward` and `after`, over the oldest ones."""
        num_new = len(values["action"])
        capacity = len(self.rows["action"])
        rows = (torch.arange(num_new) + self.count) % capacity
        for name, value in values.items():
            self.rows[name][rows] = value
        self.count += num_new

    def learn(self, round_num: int) -> tuple[float | None, int]:
        """Take one step on one mini-batch; returns the TD loss and the FLOPs."""
        stored = min(self.count, len(self.rows["action"]))
        if stored < self.batch:
            return None, 0
        source = rng.generator(self.seed, "action-q-replay", round_num)
        order = torch.randperm(stored, generator=source)
        rows = order[: self.batch]
        actions = self.rows["action"][rows]
        states = self.rows["state"][rows]
        states_after = self.rows["after"][rows]
        batch = ReplayBatch(
            obs=self._observe(states),
            chosen=F.one_hot(actions, self.actions).bool(),
            returns=self.rows["reward"][rows],
            discount=torch.full((len(rows),), self.gamma),
            next_obs=self._observe(states_after),
            next_k=torch.ones(len(rows), dtype=torch.int64),
        )
        loss = self.learner.update(batch)
        self.updates += 1
        if self.updates % self.sync == 0:
            self.learner.sync_target()
        forward = len(rows) * self.flops
        return float(loss), UPDATE_PASSES * forward

    def _observe(self, features: Tensor) -> ClientObservation:
        mask = torch.ones(len(features), self.actions, dtype=torch.bool)
        return ClientObservation(features, mask)

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue: tensors and plain values, copied."""
        num_stored = min(self.count, len(self.rows["action"]))
        stored_rows: dict[str, Tensor] = {}
        for name, values in self.rows.items():
            stored_rows[name] = values[:num_stored]
        state = {
            "learner": self.learner.state_dict(),
            "rows": stored_rows,
            "count": self.count,
            "updates": self.updates,
        }
        return deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.learner.load_state_dict(deepcopy(state["learner"]))
        self.count = state["count"]
        self.updates = state["updates"]
        for name, stored in state["rows"].items():
            self.rows[name].zero_()
            self.rows[name][: len(stored)] = stored
