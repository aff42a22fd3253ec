"""Double deep Q-learning for networks that score candidates one by one.

A candidate is a client of the population (`population_q.py`) or an action for one client
(`action_q.py`). The agent of `glimpse` has a learner of its own, with a lane axis
(`agent/learner.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.agent.learner import set_value, top_members

UPDATE_PASSES = 5  # an update in forward passes: forward and backward 3, the targets 2

Network = TypeVar("Network", bound=nn.Module)


class CandidateObservation(Protocol):
    """What a Q-network reads: anything that says which candidates exist."""

    @property
    def mask(self) -> Tensor:
        """Mark the candidates that can be chosen `[B, V]`."""


class ReplayBatch(NamedTuple):
    """B transitions of n steps."""

    obs: CandidateObservation
    chosen: Tensor  # [B, V] True for the members of the chosen set
    returns: Tensor  # [B] discounted rewards of the n steps
    discount: Tensor  # [B] gamma^n, zero where nothing follows
    next_obs: CandidateObservation  # n steps later
    next_k: Tensor  # [B] size of the set chosen there


class CandidateDQN(Generic[Network]):
    """An online network that learns and picks, and a target network that values the pick."""

    def __init__(self, online: Network, *, lr: float, grad_clip: float, loss: str) -> None:
        """Start with the target as a copy of `online`.

        Args:
            online: maps an observation to Q `[B, V]`.
            lr: step size of Adam.
            grad_clip: largest gradient norm, 0 for none.
            loss: "smooth_l1" or "mse".
        """
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(False)
        self.grad_clip = grad_clip
        self._loss: Callable[[Tensor, Tensor], Tensor] = (
            F.mse_loss if loss == "mse" else F.smooth_l1_loss
        )
        self.optimizer = torch.optim.Adam(online.parameters(), lr=lr, fused=True)

    @torch.no_grad()
    def targets(self, batch: ReplayBatch) -> Tensor:
        """Return y `[B]`: the online network picks the next set, the target network values it."""
        best = top_members(self.online(batch.next_obs), batch.next_obs.mask, batch.next_k)
        future = set_value(self.target(batch.next_obs), best)
        return batch.returns + batch.discount * future

    def update(self, batch: ReplayBatch) -> Tensor:
        """Take one step on one mini-batch; returns the TD loss. The target stays as it is."""
        targets = self.targets(batch)
        loss = self._loss(set_value(self.online(batch.obs), batch.chosen), targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.grad_clip > 0:
            nn.utils.clip_grad_norm_(self.online.parameters(), self.grad_clip, foreach=True)
        self.optimizer.step()
        return loss.detach()

    def sync_target(self) -> None:
        """Copy the online into the target network."""
        self.target.load_state_dict(self.online.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume, as copies."""
        return copy.deepcopy(
            {
                "online": self.online.state_dict(),
                "target": self.target.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`."""
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
