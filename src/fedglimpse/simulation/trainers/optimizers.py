"""SGD and Adam on stacked parameters: the arithmetic of `torch.optim`, once for all clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedglimpse.simulation.trainers.jobs import TrainingJobs, TrainingRecipe

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8  # torch.optim.Adam's defaults


class StackedOptimizer:
    """One fresh optimizer for each of J clients, stepping together.

    A step may concern only the first A jobs: gradients then have A rows, and the other jobs'
    parameters and moments stay as they are.
    """

    def __init__(self, params: list[Tensor], recipe: TrainingRecipe, jobs: TrainingJobs) -> None:
        """Update `params` (each `[J, ...]`) in place at every step."""
        self.params, self.recipe, self.jobs = params, recipe, jobs
        pulled, self.all_squared = bool((jobs.mu > 0).any()), bool(jobs.squared.all())
        self.anchors = [p.clone() for p in params] if pulled else None
        moments = {"adam": 2, "sgd": 1 if recipe.momentum else 0}[recipe.optimizer]
        self.moments = [[torch.zeros_like(p) for p in params] for _ in range(moments)]
        # [J] steps taken; in double precision, because 1 - 0.999 has only 4 digits in single
        self.steps = torch.zeros(len(jobs), device=jobs.mu.device, dtype=torch.float64)

    def memory(self) -> list[Tensor]:
        """Return everything a step changes besides the parameters."""
        return [self.steps, *(m for kind in self.moments for m in kind)]

    def reset(self) -> None:
        """Begin anew from the parameters as they are now."""
        for value in self.memory():
            value.zero_()
        for anchor, param in zip(self.anchors or [], self.params, strict=False):
            anchor.copy_(param)

    @torch.no_grad()
    def step(self, grads: list[Tensor], active: Tensor | None = None) -> None:
        """Apply one step to the first `len(grads[0])` jobs.

        Args:
            grads: gradients of every parameter.  # [A, ...]
            active: which of these jobs step; None: all of them.  # [A] bool
        """
        if not grads:  # every layer steps by itself
            return
        count = len(grads[0])
        self.steps[:count] += 1 if active is None else active
        for i, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            w = param[:count]
            shape = (-1, *[1] * (w.dim() - 1))
            gate = None if active is None else active.view(shape)
            if self.anchors is not None:
                grad = grad + self._pull(w, self.anchors[i][:count])
            if self.recipe.weight_decay:
                grad = grad.add(w, alpha=self.recipe.weight_decay)
            moments = [m[i][:count] for m in self.moments]
            if self.recipe.optimizer == "adam":
                self._adam(w, grad, moments[0], moments[1], gate)
                continue
            if moments:
                _put(moments[0], moments[0] * self.recipe.momentum + grad, gate)
                grad = moments[0]
            w.add_(grad if gate is None else grad * gate, alpha=-self.recipe.lr)

    def _adam(
        self, w: Tensor, grad: Tensor, first: Tensor, second: Tensor, gate: Tensor | None
    ) -> None:
        steps = self.steps[: len(w)].clamp(min=1).view(-1, *[1] * (w.dim() - 1))
        rate = (self.recipe.lr / (1 - BETA_1**steps)).to(w.dtype)
        root = (1 - BETA_2**steps).sqrt().to(w.dtype)
        _put(first, first.lerp(grad, 1 - BETA_1), gate)
        _put(second, (second * BETA_2).addcmul_(grad, grad, value=1 - BETA_2), gate)
        move = first / (second.sqrt() / root).add_(EPSILON) * rate
        w.sub_(move if gate is None else move * gate)

    def _pull(self, w: Tensor, anchor: Tensor) -> Tensor:
        """Gradient of FedProx's penalty; zero at the anchor in both forms."""
        shape = (-1, *[1] * (w.dim() - 1))
        mu = self.jobs.mu[: len(w)].view(shape)
        away = w - anchor
        if self.all_squared:
            return mu * away
        norm = away.flatten(1).norm(dim=1).view(shape)
        direction = torch.where(norm > 0, away / norm.clamp(min=1e-30), 0.0)
        return mu * torch.where(self.jobs.squared[: len(w)].view(shape), away, direction)


def _put(target: Tensor, value: Tensor, gate: Tensor | None) -> None:
    """Write `value` into `target` where the gate is open."""
    target.copy_(value if gate is None else torch.where(gate, value, target))
