"""Double deep Q-learning on sets of clients, for R lanes at once.

Algorithm 2, Eqs. (clientwise_q), (multistep_target) and (multistep_dqn_loss). `set_value` and
`top_members` also serve other methods that score clients one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.memory import NextRounds, NStepBatch
from fedglimpse.agent.network import QNetwork

_FAST = 0.9  # defaults of torch.optim.Adam: betas and eps
_SLOW = 0.999
_EPS = 1e-8
_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_
_IDENTITIES = "identity.weight"


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
    """Reduce per-class Q `[B, V, C]` to one score by "mean" or "min"; scalar Q `[B, V]` stays."""
    if q.dim() < 3:
        return q
    return q.mean(dim=-1) if rule == "mean" else q.amin(dim=-1)


class AgentLearner:
    """Online networks that learn and pick, target networks that follow and value the pick."""

    def __init__(
        self, config: AgentConfig, sizes: AgentSizes, seeds: Sequence[int], device: torch.device
    ) -> None:
        """Start with the target as a copy of the online network (Algorithm 1, line 4)."""
        self.config = config
        self.lr = config.lr
        self.online = QNetwork(config, sizes, seeds, device)
        self.target = QNetwork(config, sizes, seeds, device).requires_grad_(False)
        self.mean = torch.zeros_like(self.online.rows)  # [R, P] of Adam
        self.square = torch.zeros_like(self.online.rows)
        self.steps = torch.zeros(len(seeds), 1, device=device)
        self.parameters = list(self.online.parameters())
        self.decay = self._decay()
        self._equal_decay = _runs(self.decay.tolist())

    def _decay(self) -> Tensor:
        """Return the weight decay of every parameter `[P]`.

        With Adam it moves a row without any other gradient by about `lr` per step, which erases
        clients that are seldom seen; so identities have none unless they are to have it.
        """
        rates = []
        for name, parameter in self.online.named_parameters():
            spared = name == _IDENTITIES and not self.config.identity_decay
            rate = 0.0 if spared else self.config.weight_decay
            rates.append(torch.full((parameter[0].numel(),), rate))
        return torch.cat(rates).to(self.steps.device)

    @property
    def changed(self) -> dict[str, Tensor]:
        """Every tensor that a step writes to, by name `[R, P]`."""
        return {
            "online": self.online.rows,
            "target": self.target.rows,
            "mean": self.mean,
            "square": self.square,
            "steps": self.steps,  # [R, 1]
        }

    @torch.no_grad()
    def future(self, later: NextRounds, full: bool = False) -> Tensor:
        """Return the value of the best sets later `[R, B]` or `[R, B, C]`, Eq. (multistep_target).

        The online network picks the next set, the target network values it.

        Args:
            later: what the transitions lead to.
            full: nothing in it is masked.
        """
        obs = later.obs
        q = self.online(obs, full)[0].flatten(0, 1)  # [R * B, V] or [R * B, V, C]
        scores = class_scores(q, self.config.per_class_score)
        best = top_members(scores, obs.mask.flatten(0, 1), later.k.flatten())
        values = set_value(self.target(obs, full)[0].flatten(0, 1), best)
        return values.view(*later.k.shape, *values.shape[1:])

    def update(
        self,
        batch: NStepBatch,
        future: Tensor,
        weights: Tensor,
        active: Tensor,
        full: bool = False,
    ) -> Tensor:
        """Take one step on one mini-batch of every lane, Eq. (multistep_dqn_loss).

        Args:
            batch: B transitions of each lane.
            future: value of the best set n steps later.  # [R, B] or [R, B, C]
            weights: of a transition in its mini-batch's mean; 0: padding.  # [R, B]
            active: 1 for lanes that learn, 0 for those that wait.  # [R, 1]
            full: nothing in the batch is masked.

        Returns:
            The TD loss of each lane `[R]`.
        """
        targets = batch.returns + self.config.gamma**self.config.n_step * future
        q = self.online(batch.obs, full)[0].flatten(0, 1)
        value = set_value(q, batch.chosen.flatten(0, 1)).view(targets.shape)
        loss_of = F.mse_loss if self.config.loss == "mse" else F.smooth_l1_loss
        losses = loss_of(value, targets, reduction="none")  # [R, B] or [R, B, C]
        if losses.dim() == 3:
            losses = losses.mean(dim=2)
        loss = (losses * weights).sum(dim=1)  # [R]
        total = loss.sum()
        if self.config.aux_weight:
            total = total + self._histogram_loss(batch, weights)
        self._step(total, active)
        return loss.detach()

    def _histogram_loss(self, batch: NStepBatch, weights: Tensor) -> Tensor:
        """Return the auxiliary loss of the release; rounds without a histogram do not count."""
        predicted = self.online.histogram(batch.obs)  # [R, B, C]
        known = batch.histogram.isfinite().all(dim=2) & (weights > 0)  # [R, B]
        distance = (predicted - batch.histogram.nan_to_num()).abs().mean(dim=2)
        of_lane = torch.where(known, distance, 0.0).sum(dim=1) / known.sum(dim=1).clamp_min(1)
        return self.config.aux_weight * of_lane.sum()

    def _step(self, loss: Tensor, active: Tensor) -> None:
        """Move the active lanes down the gradient of the summed loss; targets follow.

        Steps are those of `torch.optim`, lane by lane; Algorithm 2, lines 4 and 5.
        """
        gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        with torch.no_grad():
            gradient = torch.cat([g.flatten(1) for g in gradients], dim=1)  # [R, P]
            if self.config.grad_clip > 0:
                norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
                gradient *= (self.config.grad_clip / (norm + _CLIP_EPS)).clamp(max=1.0)
            if self.config.optimizer == "sgd":
                gradient = torch.addcmul(gradient, self.online.rows, self.decay)
                self.online.rows.addcmul_(gradient, active, value=-self.lr)
            elif gradient.device.type == "cpu":
                self._fused_adam(gradient, active)
            else:
                self._adam(gradient, active)
            self.target.rows.lerp_(self.online.rows, self.config.tau * active)

    def _adam(self, gradient: Tensor, active: Tensor) -> None:
        """Step all rows at once, without a look at who is active: a CUDA graph records this."""
        gradient = torch.addcmul(gradient, self.online.rows, self.decay)
        self.steps += active
        self.mean.lerp_(gradient, (1 - _FAST) * active)
        self.square.lerp_(gradient.square(), (1 - _SLOW) * active)
        step = self.steps.clamp(min=1)
        size = active * (self.lr / (1 - _FAST**step))  # [R, 1]
        deviation = (self.square * (1 / (1 - _SLOW**step))).sqrt_().add_(_EPS)
        self.online.rows.addcmul_(self.mean / deviation, size, value=-1.0)

    def _fused_adam(self, gradient: Tensor, active: Tensor) -> None:
        """Step the active rows by the kernel of `torch.optim.Adam(fused=True)`."""
        self.steps += active
        lanes = active.flatten().nonzero().flatten().tolist()
        steps = [self.steps[lane, 0] for lane in lanes]
        matrices = (self.online.rows, gradient, self.mean, self.square)
        for columns, decay in self._equal_decay:
            weights, gradients, means, squares = (
                [matrix[lane, columns] for lane in lanes] for matrix in matrices
            )
            torch._fused_adam_(
                weights, gradients, means, squares, [], steps, lr=self.lr, beta1=_FAST,
                beta2=_SLOW, weight_decay=decay, eps=_EPS, amsgrad=False, maximize=False,
            )  # fmt: skip

    def start_from(self, lane: int, weights: dict[str, Tensor]) -> None:
        """Let a lane start with these weights: its target is a copy, its optimizer fresh."""
        self.online.load_lane_weights(lane, weights)
        self.target.rows[lane] = self.online.rows[lane]
        for tensor in (self.mean, self.square, self.steps):
            tensor[lane] = 0.0

    def state_dict(self, lane: int) -> dict[str, Any]:
        """Return everything needed to resume a lane: rows of parameters and of Adam."""
        return {name: tensor[lane].cpu().clone() for name, tensor in self.changed.items()}

    def load_state_dict(self, lane: int, state: dict[str, Any]) -> None:
        """Resume a lane from `state`."""
        for name, tensor in self.changed.items():
            tensor[lane] = state[name].to(tensor.device)


def _runs(rates: Sequence[float]) -> list[tuple[slice, float]]:
    """Join neighbouring parameters of the same weight decay."""
    runs: list[tuple[slice, float]] = []
    start = 0
    for rate, group in groupby(rates):
        stop = start + len(list(group))
        runs.append((slice(start, stop), rate))
        start = stop
    return runs
