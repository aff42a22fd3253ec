"""Full gradients at a fixed model, and how far two of them are apart (HA-EdgeFLow)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedglimpse.federation.state import Layout
from fedglimpse.simulation.evaluation import Evaluator

BATCH = 200


def mean_gradient(evaluator: Evaluator, state: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the mean loss over all examples, at `state`.

    BatchNorm uses its running statistics and does not change them, so that the batches are
    independent: their mean, weighted by size, is the gradient over all examples at once.

    Args:
        evaluator: holds the model.
        state: where the gradient is taken.  # [d]
        x: raw examples.  # [n, *shape]
        y: their labels.  # [n]

    Returns:
        The gradient of all parameters, 0 for those that do not train.  # [num_params]
    """
    evaluator.load(state)
    params = list(evaluator.model.parameters())
    trained = [p for p in params if p.requires_grad]
    total = state.new_zeros(evaluator.layout.num_params)
    for some_x, some_y in zip(x.split(BATCH), y.split(BATCH), strict=True):
        loss = F.cross_entropy(evaluator.forward(some_x).float(), some_y, reduction="sum")
        grads = iter(torch.autograd.grad(loss / len(y), trained, materialize_grads=True))
        each = [next(grads) if p.requires_grad else torch.zeros_like(p) for p in params]
        total += torch.cat([g.flatten() for g in each])
    return total


def mean_gradients(
    evaluator: Evaluator, states: Tensor, xs: Sequence[Tensor], ys: Sequence[Tensor]
) -> Tensor:
    """Return `mean_gradient` of every state, each over its own examples.

    Args:
        evaluator: holds the model.
        states: where the gradients are taken.  # [S, d]
        xs: raw examples, one tensor for each state.
        ys: their labels.

    Returns:
        The gradients.  # [S, num_params]
    """
    if evaluator.many is None or not len(states):
        rows = [mean_gradient(evaluator, s, x, y) for s, x, y in zip(states, xs, ys, strict=True)]
        return torch.stack(rows) if rows else states.new_zeros(0, evaluator.layout.num_params)
    sizes = torch.tensor([len(y) for y in ys], device=states.device)
    x, y = (pad_sequence(list(parts), batch_first=True) for parts in (xs, ys))
    return evaluator.many.gradients(states, x, y, sizes)


def distance(layout: Layout, ours: Tensor, theirs: Tensor, per_tensor: bool) -> Tensor:
    """Return how far gradients `[..., num_params]` are from another one `[...]`.

    Args:
        layout: of the model.
        ours: gradients.
        theirs: another.
        per_tensor: sum the norms of all parameter tensors, as the authors do; else one norm of
            the whole difference.
    """
    away = ours - theirs
    if not per_tensor:
        return away.norm(dim=-1)
    return torch.stack([away[..., e.start : e.stop].norm(dim=-1) for e in layout.params]).sum(0)
