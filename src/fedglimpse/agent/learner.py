"""Double deep Q-learning on sets of clients, for any network that scores clients one by one.

The learner knows nothing about observations but their mask of real clients, so that every method
with a per-client Q can use it: Algorithm 2, Eqs. (clientwise_q), (multistep_target) and
(multistep_dqn_loss).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.agent.copies import copied

Network = TypeVar("Network", bound=nn.Module)


class Masked(Protocol):
    """Whatever a Q-network reads, as long as it says which slots are real clients."""

    @property
    def mask(self) -> Tensor:
        """[B, V] True for real clients."""


class Batch(NamedTuple):
    """B transitions of n steps."""

    obs: Any  # Masked: what the agent saw
    chosen: Tensor  # [B, V] True for the chosen clients
    returns: Tensor  # [B] discounted rewards of the n steps, or [B, C] per class
    discount: Tensor  # [B] gamma^n, zero where nothing follows
    next_obs: Any  # Masked: what it saw n steps later
    next_k: Tensor  # [B] budget of that later choice
    histogram: Tensor | None = None  # [B, C] for an auxiliary loss

    def rows(self, part: slice) -> Batch:
        """Return some of the transitions."""
        return Batch(*(_rows(value, part) for value in self))


def _rows(value: Any, part: slice) -> Any:
    """Slice a tensor, or every tensor of a named tuple."""
    if isinstance(value, tuple):
        return type(value)(*(_rows(v, part) for v in value))
    return None if value is None else value[part]


def set_value(q: Tensor, chosen: Tensor) -> Tensor:
    """Return the Q of sets: the mean Q of their clients, Eq. (clientwise_q).

    Args:
        q: client-wise Q.  # [B, V] or [B, V, C]
        chosen: members of the set.  # [B, V]
    """
    member = chosen if q.dim() == 2 else chosen.unsqueeze(-1)
    size = chosen.sum(dim=1).clamp_min(1).view(-1, *[1] * (q.dim() - 2))
    return torch.where(member, q, 0.0).sum(dim=1) / size  # [B] or [B, C]


def top_members(scores: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    """Mark the min(k, V) best real clients of every row `[B, V]`; padding is never chosen."""
    real = scores.masked_fill(~mask, -torch.inf)
    rank = real.argsort(dim=1, descending=True).argsort(dim=1)
    return (rank < k[:, None]) & mask


def class_scores(q: Tensor, rule: str) -> Tensor:
    """Reduce per-class Q `[..., V, C]` to one score by "mean" or "min"; scalar Q stays."""
    if q.dim() < 3:
        return q
    return q.mean(dim=-1) if rule == "mean" else q.amin(dim=-1)


class DoubleDQN(Generic[Network]):
    """An online network that learns and picks, a target network that follows and judges."""

    def __init__(
        self,
        online: Network,
        *,
        lr: float,
        weight_decay: float,
        tau: float,
        grad_clip: float,
        loss: str,
        optimizer: str,
        score: str = "mean",
        undecayed: Iterable[nn.Parameter] = (),
    ) -> None:
        """Start with the target as a copy of `online` (Algorithm 1, line 4).

        Args:
            online: maps an observation to Q, [B, V] or [B, V, C].
            lr: step size.
            weight_decay: L2 penalty.
            tau: share of the online weights in a soft update.
            grad_clip: largest gradient norm, 0 for none.
            loss: "smooth_l1" or "mse".
            optimizer: "adam" or "sgd".
            score: how per-class Q ranks clients.
            undecayed: parameters without L2 penalty.
        """
        self.online = online
        self.target = copy.deepcopy(online).requires_grad_(False)
        self.tau, self.grad_clip, self.score = tau, grad_clip, score
        self._loss: Callable[[Tensor, Tensor], Tensor] = (
            F.mse_loss if loss == "mse" else F.smooth_l1_loss
        )
        spared = list(undecayed)
        names = {id(p) for p in spared}
        groups = [{"params": [p for p in online.parameters() if id(p) not in names]}]
        if spared:
            groups.append({"params": spared, "weight_decay": 0.0})  # type: ignore[dict-item]
        kind = torch.optim.Adam if optimizer == "adam" else torch.optim.SGD
        self.optimizer = kind(groups, lr=lr, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def targets(self, batch: Batch) -> Tensor:
        """Return y: the online network picks the next set, the target network judges it."""
        scores = class_scores(self.online(batch.next_obs), self.score)
        best = top_members(scores, batch.next_obs.mask, batch.next_k)
        future = set_value(self.target(batch.next_obs), best)  # [B] or [B, C]
        discount = batch.discount.view(-1, *[1] * (future.dim() - 1))
        return batch.returns + discount * future

    def update(
        self, batch: Batch, extra: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Take one step on one mini-batch and let the target follow; returns the TD loss.

        Args:
            batch: transitions on the networks' device.
            extra: another loss of the online network to add.
            targets: y of the batch, where it was worked out before.
        """
        y = self.targets(batch) if targets is None else targets
        loss = self._loss(set_value(self.online(batch.obs), batch.chosen), y)
        total = loss if extra is None else loss + extra
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        if self.grad_clip > 0:
            nn.utils.clip_grad_norm_(self.online.parameters(), self.grad_clip, foreach=True)
        self.optimizer.step()
        self.follow(self.tau)
        return loss.detach()

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Move the target towards the online network: Algorithm 2, line 5."""
        torch._foreach_lerp_(list(self.target.parameters()), list(self.online.parameters()), share)

    def fit_optimizer(self) -> None:
        """Give the optimizer's memory room for parameters whose first dimension grew."""
        for parameter, memory in self.optimizer.state.items():
            for name, value in memory.items():
                if torch.is_tensor(value) and value.dim() and len(value) < len(parameter):
                    wider = torch.zeros_like(parameter)
                    wider[: len(value)] = value
                    memory[name] = wider

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue, copied: torch hands out the living tensors."""
        state: dict[str, Any] = copied(
            {
                "online": self.online.state_dict(),
                "target": self.target.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            }
        )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.online.load_state_dict(state["online"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
