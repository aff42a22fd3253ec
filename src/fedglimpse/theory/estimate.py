"""One pass over a client's examples at a fixed model: loss, gradient, and how noisy batches are.

Gradients are taken in evaluation mode, as in `simulation/gradients.py`: BatchNorm uses its running
statistics, so that a client's gradient is the mean of those of its batches.

What Theorem 1 is made of, measured at one stored model of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data.population import Population
from fedglimpse.simulation.evaluation import Evaluator

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


@dataclass(frozen=True)
class Recipe:
    """How local training takes its gradients."""

    lr: float  # eta
    batch_size: int
    examples: int = 0  # examples of a client that are used; 0: all


@dataclass(frozen=True)
class Point:
    """One round of one lane; norms are squared, as in the theorem."""

    round: int
    loss: float  # F(W)
    gradient: float  # ||grad F(W)||^2
    gap: float  # d^2 = ||grad F - grad F_C||^2
    spread: float  # Gamma^2, mean over C of ||grad F_n - grad F_C||^2
    deviation: float  # ||grad F_C - grad F_S||^2
    weighted_deviation: float  # the same with the weights that were applied, scaled to sum to 1
    random_deviation: float  # what a uniformly random choice of as many gives in the mean
    second_moment: float  # G^2, largest of the visible clients
    noise: float  # sigma^2, largest of the visible clients
    smoothness: float  # L, largest secant over one local step of the visible clients
    visible: int  # |C|
    selected: int  # |S|
    delta_q: float | None = None  # best Q minus mean Q of the visible clients
    mu: float | None = None  # largest mu of quadratic growth that their Q-values allow
    l_q: float | None = None  # smallest L_Q that their Q-values allow


def random_deviation(spread: float, visible: int, selected: int) -> float:
    """Return the mean of ||grad F_C - grad F_S||^2 over all subsets of `selected` clients."""
    if visible < 2:
        return 0.0
    return spread * (visible - selected) / (selected * (visible - 1))


def measure(
    evaluator: Evaluator,
    population: Population,
    state: Tensor,
    record: Mapping[str, Any],
    recipe: Recipe,
    seed: int,
) -> Point | None:
    """Measure one model; None where the round chose nobody.

    Args:
        evaluator: holds the model.
        population: of the lane.
        state: the global model.  # [d]
        record: of the round that started from it.
        recipe: of local training.
        seed: of the lane.
    """
    visible = [i for i in record["visible"] if population.sizes[i]]
    if not record["selected"]:
        return None
    passes, total, losses = {}, None, []
    holders = [i for i in range(population.num_clients) if population.sizes[i]]
    for client in holders:
        batch = recipe.batch_size if client in visible else LARGE
        found = _pass(evaluator, population, state, client, record["round"], recipe, seed, batch)
        total = found.gradient.double() if total is None else total + found.gradient
        losses.append(found.loss)
        if client in visible:
            passes[client] = found
    assert total is not None
    gradients = torch.stack([passes[i].gradient for i in visible]).double()  # [V, P]
    cluster = gradients.mean(0)
    spread = float((gradients - cluster).square().sum(1).mean())
    chosen = torch.tensor([visible.index(i) for i in record["selected"]])
    weights = torch.tensor(record["weights"], dtype=torch.double)
    return Point(
        round=record["round"],
        loss=sum(losses) / len(losses),
        gradient=_squared(total / len(holders)),
        gap=_squared(total / len(holders) - cluster),
        spread=spread,
        deviation=_squared(cluster - gradients[chosen].mean(0)),
        weighted_deviation=_weighted(gradients[chosen], weights, cluster),
        random_deviation=random_deviation(spread, len(visible), len(chosen)),
        second_moment=max(p.second_moment for p in passes.values()),
        noise=max(p.noise for p in passes.values()),
        smoothness=_smoothness(evaluator, population, state, passes, record["round"], recipe, seed),
        visible=len(visible),
        selected=len(chosen),
        **_of_q(gradients, visible, record),
    )


def implied_q(gradients: Tensor, q: Tensor) -> dict[str, float | None]:
    """Return Delta_Q, mu and L_Q that the Q-values of one round imply.

    The best client stands for v*: mu is the largest constant for which quadratic growth holds at
    all others, L_Q the smallest for which the smoothness inequality does. Delta_Q takes the mean
    Q-value for Q(grad F_C), which no network was asked for.

    Args:
        gradients: of the clients.  # [V, P]
        q: their Q-values.  # [V]
    """
    best = int(q.argmax())
    away = (gradients - gradients[best]).square().sum(1)  # [V]
    others = away > 0
    if not bool(others.any()):
        return {"delta_q": None, "mu": None, "l_q": None}
    ratios = 2 * (q[best] - q[others]) / away[others]
    return {
        "delta_q": float(q[best] - q.mean()),
        "mu": float(ratios.min()),
        "l_q": float(ratios.max()),
    }


def _pass(
    evaluator: Evaluator,
    population: Population,
    state: Tensor,
    client: int,
    round_num: int,
    recipe: Recipe,
    seed: int,
    batch: int,
) -> Pass:
    draw = rng.generator(seed, "theory", round_num, client)
    x, y = examples_of(population, client, recipe.examples, draw)
    return full_pass(evaluator, state, x, y, batch)


def _smoothness(
    evaluator: Evaluator,
    population: Population,
    state: Tensor,
    passes: Mapping[int, Pass],
    round_num: int,
    recipe: Recipe,
    seed: int,
) -> float:
    """Return the largest ||grad F_n(W - eta g) - g|| / ||eta g||, g the client's gradient at W."""
    largest = 0.0
    for client, before in passes.items():
        step = torch.zeros_like(state)
        step[: len(before.gradient)] = recipe.lr * before.gradient
        if not float(step.norm()):
            continue
        after = _pass(
            evaluator, population, state - step, client, round_num, recipe, seed, LARGE
        ).gradient
        largest = max(largest, float((after - before.gradient).norm() / step.norm()))
    return largest


def _of_q(
    gradients: Tensor, visible: Sequence[int], record: Mapping[str, Any]
) -> dict[str, float | None]:
    """Return what a method's recorded Q-values imply; nothing for a method without them."""
    scored = [i for i, client in enumerate(visible) if client not in record["rejected"]]
    q = record.get("q")
    if q is None or len(q) != len(scored):
        return {}
    return implied_q(gradients[scored], torch.tensor(q, dtype=torch.double))


def _weighted(gradients: Tensor, weights: Tensor, cluster: Tensor) -> float:
    if not float(weights.sum()):
        weights = torch.ones_like(weights)
    mean = (weights / weights.sum()).to(gradients) @ gradients
    return _squared(cluster - mean)


def _squared(vector: Tensor) -> float:
    return float(vector.double().square().sum())
