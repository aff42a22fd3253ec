"""Whole federated trainings of quadratics, with every constant of the theorem along the way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.theory.bound import Constants, QConstants
from fedglimpse.theory.lemmas import Growth
from fedglimpse.theory.moments import Cloud, aggregate, local_path, mean_square
from fedglimpse.theory.quadratics import Quadratics, shares, subsets


@dataclass(frozen=True)
class Setting:
    """How a federation of quadratics is trained."""

    rounds: int  # T
    steps: int  # k
    visible: int  # |C|
    selected: int  # |S|
    lr: Tensor  # [B]
    noise: Tensor  # [B] sigma^2


@dataclass(frozen=True)
class Trained:
    """What came of it."""

    measured: Tensor  # [B] mean over rounds of E ||grad F(W^t)||^2
    constants: Constants[Tensor]
    q: QConstants[Tensor] | None


def train(
    problem: Quadratics,
    start: Tensor,
    setting: Setting,
    smoothness: Tensor,
    seed: int,
    growth: Growth | None = None,
) -> Trained:
    """Train with random clusters; the choice is random, or by Q where there is no noise.

    Args:
        problem: the clients.
        start: W^0.  # [B, p]
        setting: of the training.
        smoothness: L as it enters the bound.  # [B]
        seed: of clusters and choices.
        growth: choose the clients with the largest Q; needs `setting.noise` to be zero, because
            the choice would otherwise be random.
    """
    cloud, source = Cloud.at(start), rng.generator(seed, "quadratic-clusters")
    sums = {name: torch.zeros(len(start), dtype=torch.double) for name in _MEANS}
    second_moment = torch.zeros_like(sums["gap"])
    for _ in range(setting.rounds):
        cluster = subsets(len(start), problem.clients, setting.visible, source)
        chosen = cluster[:, : setting.selected]
        if growth is not None:
            chosen = _best(problem, cloud.mean, cluster, growth, setting.selected)
            sums["delta"] += _delta(problem, cloud.mean, cluster, growth)
        for name, value in _round(problem, cloud, cluster, chosen).items():
            sums[name] += value
        path = local_path(problem, cloud, chosen, setting.lr, setting.steps, setting.noise)
        second_moment = second_moment.maximum(path.gradient_square.amax((1, 2)))
        cloud = aggregate(problem, cloud, path, setting.lr, setting.noise)
    means = {name: value / setting.rounds for name, value in sums.items()}
    constants = Constants(
        rounds=setting.rounds,
        steps=setting.steps,
        lr=setting.lr,
        start=problem.value(start) - problem.value(problem.optimum()),
        gap=means["gap"],
        spread=means["spread"],
        deviation=means["deviation"],
        second_moment=second_moment,
        noise=setting.noise,
        smoothness=smoothness,
        visible=setting.visible,
        ratio=setting.selected / setting.visible,
        per_selected=1 / setting.selected,
    )
    if growth is None:
        return Trained(means["gradient"], constants, None)
    return Trained(means["gradient"], constants, QConstants(means["delta"], *growth.limits()))


_MEANS = ("gradient", "gap", "spread", "deviation", "delta")


def _round(problem: Quadratics, cloud: Cloud, cluster: Tensor, chosen: Tensor) -> dict[str, Tensor]:
    """Return the expected squares of one round `[B]`."""
    clients = problem.clients
    whole = torch.full((len(cluster), clients), 1 / clients, dtype=torch.double)
    of_cluster, of_chosen = shares(cluster, clients), shares(chosen, clients)
    each = torch.nn.functional.one_hot(cluster, clients).double()  # [B, V, N]
    sums = torch.stack([whole, whole - of_cluster, of_cluster - of_chosen], 1)
    gradient, gap, deviation = mean_square(problem, sums, cloud).unbind(1)
    spread = mean_square(problem, each - of_cluster[:, None], cloud).mean(1)
    return {"gradient": gradient, "gap": gap, "spread": spread, "deviation": deviation}


def _best(problem: Quadratics, w: Tensor, cluster: Tensor, growth: Growth, count: int) -> Tensor:
    gradients = problem.gradients(w)[torch.arange(len(w))[:, None], cluster]
    return cluster.gather(1, growth.q(gradients).argsort(1, descending=True)[:, :count])


def _delta(problem: Quadratics, w: Tensor, cluster: Tensor, growth: Growth) -> Tensor:
    gradients = problem.gradients(w)[torch.arange(len(w))[:, None], cluster]
    return growth.constants(gradients.mean(1)).delta
