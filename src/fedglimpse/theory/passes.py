"""One pass over a client's examples at a fixed model: loss, gradient, and how noisy batches are.

Gradients are taken in evaluation mode, as in `sim/gradients.py`: BatchNorm uses its running
statistics, so that a client's gradient is the mean of those of its batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.data.population import Population
from fedglimpse.sim.evaluate import Evaluator

LARGE = 200  # examples at once where single batches do not matter


@dataclass(frozen=True)
class Pass:
    """What one client says of one model."""

    loss: float  # F_n
    gradient: Tensor  # [P] of F_n, parameters only
    noise: float  # mean ||g_b - gradient||^2 over its batches
    second_moment: float  # mean ||g_b||^2 over its batches


def examples_of(
    population: Population, client: int, limit: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a client's examples in random order, at most `limit` of them (0: all)."""
    rows = population.rows[client]
    rows = rows[torch.randperm(len(rows), generator=draw)]
    rows = (rows[:limit] if limit else rows).to(population.dataset.y_train.device)
    return population.dataset.x_train[rows], population.dataset.y_train[rows]


def full_pass(evaluator: Evaluator, state: Tensor, x: Tensor, y: Tensor, batch: int) -> Pass:
    """Go once over the examples in batches, as an epoch of training does.

    Args:
        evaluator: holds the model.
        state: where gradients are taken.  # [d]
        x: raw examples in the order of the epoch.  # [n, *shape]
        y: their labels.  # [n]
        batch: examples of a batch; a last batch of one is skipped by training and does not count
            as a batch here either, only towards the mean.
    """
    evaluator.load(state)
    parts = list(zip(x.split(batch), y.split(batch), strict=True))
    found = [batch_gradient(evaluator, *part) for part in parts]
    shares = torch.tensor([len(part[1]) / len(y) for part in parts])
    gradients = torch.stack([gradient for _, gradient in found])  # [batches, P]
    mean = (shares.to(gradients)[:, None] * gradients).sum(0)
    stepped = gradients[[i for i, part in enumerate(parts) if len(part[1]) > 1 or i == 0]]
    return Pass(
        loss=sum(float(s) * value for s, (value, _) in zip(shares, found, strict=True)),
        gradient=mean,
        noise=float((stepped - mean).double().square().sum(1).mean()),
        second_moment=float(stepped.double().square().sum(1).mean()),
    )


def batch_gradient(evaluator: Evaluator, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Return the mean loss of the loaded model on a batch and its gradient `[P]`."""
    loss = F.cross_entropy(evaluator.forward(x).float(), y)
    grads = torch.autograd.grad(loss, list(evaluator.model.parameters()), materialize_grads=True)
    return float(loss.detach()), torch.cat([g.flatten() for g in grads])
