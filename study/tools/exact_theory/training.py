"""Federated SGD on quadratics with additive noise, followed exactly.

Stochastic gradients are grad F_n(w) + e with independent, isotropic e of variance sigma^2. The mean
and the covariance of every model follow linear recursions, so that each expectation of the theorem
is computed and none is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exact_theory.quadratics import QuadraticQ, Quadratics, mean_weights, subsets
from fedglimpse import rng
from fedglimpse.theory.bound import Constants, QConstants


@dataclass(frozen=True)
class RandomPoint:
    """A random point of every instance, by its first two moments."""

    mean: Tensor  # [B, ..., p]
    covariance: Tensor  # [B, ..., p, p]

    @staticmethod
    def fixed(point: Tensor) -> RandomPoint:
        """Return points `[B, p]` that are not random."""
        dim = point.shape[-1]
        return RandomPoint(point, point.new_zeros(*point.shape, dim))


@dataclass(frozen=True)
class LocalPath:
    """Local models W_{n,0}, ..., W_{n,k} of some clients, started from the same random W."""

    ids: Tensor  # [B, V]
    models: list[RandomPoint]  # k + 1 points of [B, V, p]
    gradient_square: Tensor  # [B, V, k] E ||stochastic gradient||^2 before each step


@dataclass(frozen=True)
class LocalSgd:
    """How a client trains in one round."""

    steps: int  # k
    lr: Tensor  # [B] eta
    noise: Tensor  # [B] sigma^2


@dataclass(frozen=True)
class Schedule:
    """How a federation of quadratics is trained."""

    rounds: int  # T
    visible: int  # |C|
    selected: int  # |S|
    local: LocalSgd


@dataclass(frozen=True)
class TrainingResult:
    """Both sides of the theorem after one federated training."""

    measured: Tensor  # [B] mean over rounds of E ||grad F(W^t)||^2
    constants: Constants[Tensor]
    q: QConstants[Tensor] | None  # None: the clients were chosen at random


def mean_square(problem: Quadratics, weights: Tensor, point: RandomPoint) -> Tensor:
    """Return E ||sum_n weights_n grad F_n(W)||^2.

    Args:
        problem: the clients.
        weights: of the clients, for M sums.  # [B, M, N]
        point: W.  # [B, p]

    Returns:
        One value for each sum.  # [B, M]
    """
    matrix = torch.einsum("bmn,bnij->bmij", weights, problem.curvature)
    offset = torch.einsum("bmn,bnij,bnj->bmi", weights, problem.curvature, problem.centre)
    mean = torch.einsum("bmij,bj->bmi", matrix, point.mean) - offset
    scatter = torch.einsum("bmij,bjk,bmik->bm", matrix, point.covariance, matrix)
    return mean.square().sum(-1) + scatter


def local_path(problem: Quadratics, start: RandomPoint, ids: Tensor, local: LocalSgd) -> LocalPath:
    """Follow local SGD of the clients `ids` `[B, V]` from the global model `start` `[B, p]`."""
    clients = problem.subset(ids)
    step_size = local.lr[:, None, None]
    contraction = _contraction(clients, local)
    step_noise = _noise_of_a_step(clients, local)
    mean = start.mean[:, None].expand_as(clients.centre)
    covariance = start.covariance[:, None].expand_as(clients.curvature)
    models = [RandomPoint(mean, covariance)]
    squares = []
    for _ in range(local.steps):
        gradient = torch.einsum("bvij,bvj->bvi", clients.curvature, mean - clients.centre)
        scatter = torch.einsum(
            "bvij,bvjk,bvik->bv", clients.curvature, covariance, clients.curvature
        )
        squares.append(gradient.square().sum(-1) + scatter + local.noise[:, None])
        mean = mean - step_size * gradient
        covariance = contraction @ covariance @ contraction + step_noise
        models.append(RandomPoint(mean, covariance))
    return LocalPath(ids, models, torch.stack(squares, -1))


def aggregate(
    problem: Quadratics, start: RandomPoint, path: LocalPath, local: LocalSgd
) -> RandomPoint:
    """Return the mean of the last local models: the next global model.

    Noise of clients is independent, the start is shared: covariances do not simply average.
    """
    clients = problem.subset(path.ids)
    contraction = _contraction(clients, local)
    start_factor = torch.linalg.matrix_power(contraction, local.steps).mean(1)  # [B, p, p]
    powers = [torch.linalg.matrix_power(contraction, 2 * i) for i in range(local.steps)]
    noise_factor = torch.stack(powers).sum(0).mean(1) / clients.clients  # [B, p, p]
    dim = clients.centre.shape[-1]
    scale = (local.lr.square() * local.noise / dim)[:, None, None]
    covariance = start_factor @ start.covariance @ start_factor.mT + scale * noise_factor
    return RandomPoint(path.models[-1].mean.mean(1), covariance)


def _contraction(clients: Quadratics, local: LocalSgd) -> Tensor:
    """Return I - eta A_n, what one step does to a deviation from the mean `[B, V, p, p]`."""
    identity = torch.eye(clients.centre.shape[-1], dtype=torch.double)
    return identity - local.lr[:, None, None, None] * clients.curvature


def _noise_of_a_step(clients: Quadratics, local: LocalSgd) -> Tensor:
    """Return the covariance that one step adds `[B, 1, p, p]`."""
    dim = clients.centre.shape[-1]
    identity = torch.eye(dim, dtype=torch.double)
    return (local.lr.square() * local.noise / dim)[:, None, None, None] * identity


def train(
    problem: Quadratics,
    start: Tensor,
    schedule: Schedule,
    smoothness: Tensor,
    seed: int,
    q: QuadraticQ | None = None,
) -> TrainingResult:
    """Train with random clusters; the choice is random, or by Q where there is no noise.

    Args:
        problem: the clients.
        start: W^0.  # [B, p]
        schedule: of the training.
        smoothness: L as it enters the bound.  # [B]
        seed: of clusters and choices.
        q: choose the clients with the largest Q; needs noise to be zero, because the choice would
            otherwise be random.
    """
    model = RandomPoint.fixed(start)
    source = rng.generator(seed, "quadratic-clusters")
    sums = {name: torch.zeros(len(start), dtype=torch.double) for name in _MEANS}
    second_moment = torch.zeros_like(sums["gap"])
    for _ in range(schedule.rounds):
        cluster = subsets(len(start), problem.clients, schedule.visible, source)
        chosen = cluster[:, : schedule.selected]
        if q is not None:
            gradients = problem.gradients_of(cluster, model.mean)
            chosen = cluster.gather(1, q.largest(gradients, schedule.selected))
            sums["delta"] += q.delta(gradients.mean(1))
        for name, value in _round_terms(problem, model, cluster, chosen).items():
            sums[name] += value
        path = local_path(problem, model, chosen, schedule.local)
        second_moment = second_moment.maximum(path.gradient_square.amax((1, 2)))
        model = aggregate(problem, model, path, schedule.local)
    means = {name: value / schedule.rounds for name, value in sums.items()}
    constants = Constants(
        rounds=schedule.rounds,
        steps=schedule.local.steps,
        lr=schedule.local.lr,
        start=problem.value(start) - problem.value(problem.optimum()),
        gap=means["gap"],
        spread=means["spread"],
        deviation=means["deviation"],
        second_moment=second_moment,
        noise=schedule.local.noise,
        smoothness=smoothness,
        visible=schedule.visible,
        ratio=schedule.selected / schedule.visible,
        per_selected=1 / schedule.selected,
    )
    of_q = None if q is None else QConstants(means["delta"], *q.limits())
    return TrainingResult(means["gradient"], constants, of_q)


_MEANS = ("gradient", "gap", "spread", "deviation", "delta")


def _round_terms(
    problem: Quadratics, model: RandomPoint, cluster: Tensor, chosen: Tensor
) -> dict[str, Tensor]:
    """Return the expected squares of one round `[B]`."""
    clients = problem.clients
    of_all = torch.full((len(cluster), clients), 1 / clients, dtype=torch.double)
    of_cluster = mean_weights(cluster, clients)
    of_chosen = mean_weights(chosen, clients)
    sums = torch.stack([of_all, of_all - of_cluster, of_cluster - of_chosen], 1)
    gradient, gap, deviation = mean_square(problem, sums, model).unbind(1)
    of_single = torch.nn.functional.one_hot(cluster, clients).double()  # [B, V, N]
    spread = mean_square(problem, of_single - of_cluster[:, None], model).mean(1)
    return {"gradient": gradient, "gap": gap, "spread": spread, "deviation": deviation}
