"""SGD and Adam on stacked parameters: the arithmetic of `torch.optim`, once for all clients."""

from __future__ import annotations

import torch
from torch import Tensor

from fedglimpse.simulation.trainers.jobs import TrainingJobs, TrainingRecipe

# The defaults of torch.optim.Adam.
BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-8


class StackedOptimizer:
    """One fresh optimizer for each of J clients, stepping together.

    A step may concern only the first A jobs: gradients then have A rows, and the other jobs'
    parameters and moments stay as they are.
    """

    def __init__(self, params: list[Tensor], recipe: TrainingRecipe, jobs: TrainingJobs) -> None:
        """Update `params` (each `[J, ...]`) in place at every step."""
        self.params = params
        self.recipe = recipe
        self.jobs = jobs
        self.all_squared = bool(jobs.squared.all())

        self.anchors: list[Tensor] | None = None  # where FedProx pulls to
        is_proximal = jobs.mu > 0
        if bool(is_proximal.any()):
            self.anchors = [param.clone() for param in params]

        self.first_moments: list[Tensor] = []  # one per parameter: Adam's, or SGD's momentum
        self.second_moments: list[Tensor] = []  # one per parameter: Adam's
        if recipe.optimizer == "adam" or recipe.momentum:
            self.first_moments = _zeros_like(params)
        if recipe.optimizer == "adam":
            self.second_moments = _zeros_like(params)

        # [J] steps taken; in double precision, because 1 - 0.999 has only 4 digits in single
        self.steps = torch.zeros_like(jobs.mu, dtype=torch.float64)

    def memory(self) -> list[Tensor]:
        """Return everything a step changes besides the parameters."""
        return [self.steps, *self.first_moments, *self.second_moments]

    def reset(self) -> None:
        """Forget all steps; FedProx pulls to the parameters as they are now."""
        for value in self.memory():
            value.zero_()
        if self.anchors is not None:
            for anchor, param in zip(self.anchors, self.params, strict=True):
                anchor.copy_(param)

    @torch.no_grad()
    def step(self, grads: list[Tensor], active: Tensor | None = None) -> None:
        """Apply one step to the first `len(grads[0])` jobs.

        Args:
            grads: gradients of every parameter.  # [A, ...]
            active: which of these jobs step; None: all of them.  # [A] bool
        """
        if not grads:  # every layer steps in its own backward pass
            return
        count = len(grads[0])
        self.steps[:count] += 1 if active is None else active
        for i, param in enumerate(self.params):
            weights = param[:count]
            grad = grads[i]
            gate = None
            if active is not None:
                gate = active.view(_per_job(weights))
            if self.anchors is not None:
                anchor = self.anchors[i][:count]
                grad = grad + self._proximal_gradient(weights, anchor)
            if self.recipe.weight_decay:
                grad = grad.add(weights, alpha=self.recipe.weight_decay)
            if self.recipe.optimizer == "adam":
                self._adam_step(i, weights, grad, gate)
            else:
                self._sgd_step(i, weights, grad, gate)

    def _sgd_step(self, i: int, weights: Tensor, grad: Tensor, gate: Tensor | None) -> None:
        """Update the weights `[A, ...]` of parameter `i`, where the gate is open."""
        direction = grad
        if self.recipe.momentum:
            count = len(weights)
            direction = self.first_moments[i][:count]
            _write(direction, direction * self.recipe.momentum + grad, gate)
        if gate is not None:
            direction = direction * gate
        weights.add_(direction, alpha=-self.recipe.lr)

    def _adam_step(self, i: int, weights: Tensor, grad: Tensor, gate: Tensor | None) -> None:
        """Update the weights `[A, ...]` of parameter `i`, where the gate is open."""
        count = len(weights)
        first = self.first_moments[i][:count]
        second = self.second_moments[i][:count]
        # New moments get no names: so their memory is free again for the next step's.
        _write(first, first.lerp(grad, 1 - BETA_1), gate)
        _write(second, (second * BETA_2).addcmul_(grad, grad, value=1 - BETA_2), gate)

        # Both moments start at zero; these corrections undo that bias of the first steps.
        steps = self.steps[:count].clamp(min=1)
        steps = steps.view(_per_job(weights))
        lr = self.recipe.lr / (1 - BETA_1**steps)
        correction = (1 - BETA_2**steps).sqrt()
        scale = second.sqrt() / correction.to(weights.dtype)
        scale.add_(EPSILON)
        update = first / scale * lr.to(weights.dtype)
        if gate is not None:
            update = update * gate
        weights.sub_(update)

    def _proximal_gradient(self, weights: Tensor, anchor: Tensor) -> Tensor:
        """Gradient of FedProx's penalty; zero at the anchor in both forms."""
        count = len(weights)
        shape = _per_job(weights)
        mu = self.jobs.mu[:count].view(shape)
        offset = weights - anchor
        if self.all_squared:
            return mu * offset
        norm = offset.flatten(1).norm(dim=1)
        norm = norm.view(shape)
        unit = offset / norm.clamp(min=1e-30)
        direction = torch.where(norm > 0, unit, 0.0)
        is_squared = self.jobs.squared[:count].view(shape)
        return mu * torch.where(is_squared, offset, direction)


def _zeros_like(params: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(param) for param in params]


def _per_job(weights: Tensor) -> tuple[int, ...]:
    """Return the shape in which one number per job meets stacked weights: `[A, 1, 1, ...]`."""
    ones = [1] * (weights.dim() - 1)
    return (-1, *ones)


def _write(target: Tensor, value: Tensor, gate: Tensor | None) -> None:
    """Write `value` into `target` where the gate is open."""
    if gate is not None:
        value = torch.where(gate, value, target)
    target.copy_(value)
