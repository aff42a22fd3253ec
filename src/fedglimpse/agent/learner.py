"""Double deep Q-learning on sets of clients, for R lanes at once.

Algorithm 2, Eqs. (clientwise_q), (multistep_target) and (multistep_dqn_loss). `set_value` and
`top_members` also serve other methods that score clients one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.memory import NStepBatch
from fedglimpse.agent.network import QNetwork

_FAST = 0.9  # defaults of torch.optim.Adam: betas and eps
_SLOW = 0.999
_EPS = 1e-8
_CLIP_EPS = 1e-6  # of torch.nn.utils.clip_grad_norm_
_IDENTITIES = "identity.weight"


# How the Q-values of one client for all classes become one score; a scalar Q is its own score.
CLASS_SCORES: dict[str, Callable[..., Tensor]] = {
    "mean": torch.mean,
    "min": torch.amin,
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
}


def set_value(q: Tensor, chosen: Tensor) -> Tensor:
    """Return the Q of sets: the mean Q of their clients, Eq. (clientwise_q).

    Args:
        q: client-wise Q.  # [B, V] or [B, V, C]
        chosen: members of the set.  # [B, V]
    """
    size = chosen.sum(dim=1).clamp_min(1)  # [B]
    if q.dim() == 3:
        chosen = chosen.unsqueeze(2)
        size = size.unsqueeze(1)
    of_chosen = torch.where(chosen, q, 0.0)
    return of_chosen.sum(dim=1) / size  # [B] or [B, C]


def top_members(scores: Tensor, mask: Tensor, k: Tensor) -> Tensor:
    """Mark the min(k, V) best real clients of every row `[B, V]`; padding is never chosen."""
    real = scores.masked_fill(~mask, -torch.inf)
    best_first = real.argsort(dim=1, descending=True)
    rank = best_first.argsort(dim=1)
    return (rank < k.unsqueeze(1)) & mask


class AgentLearner:
    """Online networks that learn and pick, target networks that follow and value the pick."""

    def __init__(
        self,
        config: AgentConfig,
        sizes: AgentSizes,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        """Start with the target as a copy of the online network (Algorithm 1, line 4)."""
        self.config = config
        self.lr = config.lr
        self.class_scores = CLASS_SCORES[config.per_class_score]
        self.loss_of = LOSSES[config.loss]
        self.online = QNetwork(config, sizes, seeds, device)
        self.target = QNetwork(config, sizes, seeds, device).requires_grad_(False)
        self.mean = torch.zeros_like(self.online.rows)  # [R, P] of Adam
        self.square = torch.zeros_like(self.online.rows)
        self.steps = torch.zeros(len(seeds), 1, device=device)
        self.parameters = list(self.online.parameters())
        self.decay = self._decay()
        self._equal_decay = _runs(self.decay.tolist())
        if config.optimizer == "sgd":
            self._move = self._sgd
        elif device.type == "cpu":
            self._move = self._fused_adam
        else:
            self._move = self._adam

    def _decay(self) -> Tensor:
        """Return the weight decay of every parameter `[P]`.

        With Adam it moves a row without any other gradient by about `lr` per step, which erases
        clients that are seldom seen; so identities have none unless they are to have it.
        """
        rates = []
        for name, parameter in self.online.named_parameters():
            spared = name == _IDENTITIES and not self.config.identity_decay
            rate = 0.0 if spared else self.config.weight_decay
            num_values = parameter[0].numel()  # of one lane
            rates.append(torch.full((num_values,), rate))
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
    def future(self, obs: Observation, k: Tensor) -> Tensor:
        """Return the value of the best sets n steps later `[R, B, C]`, Eq. (multistep_target).

        The online network picks the next set, the target network values it.

        Args:
            obs: what was seen then.  # [R, B, ...]
            k: budget of the choice there.  # [R, B]
        """
        q, _ = self.online(obs)  # [R, B, V, C]
        scores = self.class_scores(q, dim=3)  # [R, B, V]
        best = top_members(
            scores.flatten(0, 1),
            obs.mask.flatten(0, 1),
            k.flatten(),
        )
        target_q, _ = self.target(obs)
        values = set_value(target_q.flatten(0, 1), best)  # [R * B, C]
        return values.view(*k.shape, -1)

    def update(
        self,
        batch: NStepBatch,
        future: Tensor,
        weights: Tensor,
        active: Tensor,
    ) -> Tensor:
        """Take one step on one mini-batch of each active lane, Eq. (multistep_dqn_loss).

        Args:
            batch: B transitions of each lane.
            future: value of the best set n steps later.  # [R, B, C]
            weights: of a transition in its mini-batch's mean; 0: padding.  # [R, B]
            active: 1 for lanes that learn, 0 for those that wait.  # [R, 1]

        Returns:
            The TD loss of each lane `[R]`.
        """
        discount = self.config.gamma**self.config.n_step
        targets = batch.returns + discount * future  # [R, B, C]
        q, _ = self.online(batch.obs)  # [R, B, V, C]
        chosen = batch.chosen.flatten(0, 1)
        values = set_value(q.flatten(0, 1), chosen)  # [R * B, C]
        losses = self.loss_of(
            values.view(targets.shape),
            targets,
            reduction="none",
        )
        of_transitions = losses.mean(dim=2)  # [R, B]
        loss = (of_transitions * weights).sum(dim=1)  # [R]
        total = loss.sum()
        if self.config.aux_weight:
            total = total + self._histogram_loss(batch, weights)
        self._step(total, active)
        return loss.detach()

    def _histogram_loss(self, batch: NStepBatch, weights: Tensor) -> Tensor:
        """Return the auxiliary loss of the release; rounds without a histogram do not count."""
        predicted = self.online.histogram(batch.obs)  # [R, B, C]
        is_finite = batch.histogram.isfinite().all(dim=2)
        is_known = is_finite & (weights > 0)  # [R, B]
        difference = predicted - batch.histogram.nan_to_num()
        distance = difference.abs().mean(dim=2)  # [R, B]
        num_known = is_known.sum(dim=1).clamp_min(1)  # [R]
        known_distance = torch.where(is_known, distance, 0.0)
        of_lanes = known_distance.sum(dim=1) / num_known  # [R]
        return self.config.aux_weight * of_lanes.sum()

    def _step(self, loss: Tensor, active: Tensor) -> None:
        """Move the active lanes down the gradient of the summed loss; targets follow.

        Steps are those of `torch.optim`, lane by lane; Algorithm 2, lines 4 and 5.
        """
        gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        with torch.no_grad():
            by_lane = [gradient.flatten(1) for gradient in gradients]
            gradient = torch.cat(by_lane, dim=1)  # [R, P]
            if self.config.grad_clip > 0:
                norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
                shrinkage = self.config.grad_clip / (norm + _CLIP_EPS)
                gradient *= shrinkage.clamp(max=1.0)
            self._move(gradient, active)
            share = self.config.tau * active  # [R, 1]
            self.target.rows.lerp_(self.online.rows, share)

    def _sgd(self, gradient: Tensor, active: Tensor) -> None:
        """Step all rows at once; those of waiting lanes by nothing."""
        gradient = torch.addcmul(gradient, self.online.rows, self.decay)
        self.online.rows.addcmul_(gradient, active, value=-self.lr)

    def _adam(self, gradient: Tensor, active: Tensor) -> None:
        """Step all rows at once, without a look at who is active: a CUDA graph records this."""
        gradient = torch.addcmul(gradient, self.online.rows, self.decay)
        self.steps += active
        fast_share = (1 - _FAST) * active
        slow_share = (1 - _SLOW) * active
        self.mean.lerp_(gradient, fast_share)
        self.square.lerp_(gradient.square(), slow_share)
        step = self.steps.clamp(min=1)  # [R, 1]
        mean_correction = 1 - _FAST**step
        square_correction = 1 - _SLOW**step
        size = active * (self.lr / mean_correction)  # [R, 1]
        unbiased_square = self.square * (1 / square_correction)
        deviation = unbiased_square.sqrt_().add_(_EPS)
        direction = self.mean / deviation
        self.online.rows.addcmul_(direction, size, value=-1.0)

    def _fused_adam(self, gradient: Tensor, active: Tensor) -> None:
        """Step the active rows by the kernel of `torch.optim.Adam(fused=True)`."""
        self.steps += active
        active_lanes = active[:, 0].nonzero()[:, 0]
        for lane in active_lanes.tolist():
            for columns, decay in self._equal_decay:
                torch._fused_adam_(
                    [self.online.rows[lane, columns]],
                    [gradient[lane, columns]],
                    [self.mean[lane, columns]],
                    [self.square[lane, columns]],
                    [],  # the largest squares, which only AMSGrad has
                    [self.steps[lane, 0]],
                    lr=self.lr,
                    beta1=_FAST,
                    beta2=_SLOW,
                    weight_decay=decay,
                    eps=_EPS,
                    amsgrad=False,
                    maximize=False,
                )

    def start_from(self, lane: int, weights: dict[str, Tensor]) -> None:
        """Let a lane start with these weights: its target is a copy, its optimizer fresh."""
        self.online.load_lane_weights(lane, weights)
        self.target.rows[lane] = self.online.rows[lane]
        for tensor in (self.mean, self.square, self.steps):
            tensor[lane] = 0.0

    def state_dict(self, lane: int) -> dict[str, Any]:
        """Return everything needed to resume a lane: rows of parameters and of Adam."""
        state: dict[str, Tensor] = {}
        for name, tensor in self.changed.items():
            state[name] = tensor[lane].cpu().clone()
        return state

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
