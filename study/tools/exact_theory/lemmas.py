"""Both sides of Lemmas 1 to 4 on quadratics, exactly: `left <= right` is what they claim."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from exact_theory.quadratics import Quadratics, mean_weights
from exact_theory.training import LocalPath, LocalSgd
from fedglimpse import rng
from fedglimpse.theory.bound import QConstants


class Sides(NamedTuple):
    """Two sides of an inequality, instance by instance."""

    left: Tensor  # [B]
    right: Tensor  # [B]

    @property
    def holds(self) -> Tensor:
        """Where left <= right, up to rounding `[B]`."""
        return self.left <= self.right + 1e-9 * (1 + self.right.abs())


def lemma_1(
    problem: Quadratics,
    w: Tensor,
    path: LocalPath,
    step: int,
    smoothness: Tensor,
    *,
    averaged: bool,
) -> Sides:
    """Return Lemma 1 at local step `step`, over the clients of `path`.

    Args:
        problem: the clients.
        w: the global model.  # [B, p]
        path: local models of the cluster, from `w`.
        step: j.
        smoothness: L.  # [B]
        averaged: average the left side over the cluster, as the proof does; else the worst
            client, as printed.
    """
    visible = problem.subset(path.ids)
    objective = problem.gradients(w).mean(1)  # [B, p]
    cluster = problem.gradients_of(path.ids, w).mean(1)
    offset = path.models[step].mean - visible.centre
    local = torch.einsum("bvij,bvj->bvi", visible.curvature, offset)
    inner = torch.einsum("bi,bvi->bv", objective, cluster[:, None] - local)
    left = inner.mean(1) if averaged else inner.amax(1)
    drift = distance_square(w, path, step).mean(1)
    return Sides(left, objective.square().sum(1) / 4 + smoothness.square() * drift)


def lemma_2(problem: Quadratics, w: Tensor, cluster: Tensor, chosen: Tensor) -> Sides:
    """Return Lemma 2 for a cluster `[B, V]` and the chosen `[B, K]`, with the exact d^2."""
    gradients = problem.gradients(w)
    objective = gradients.mean(1)
    of_cluster = _mean_over(cluster, gradients)
    of_chosen = _mean_over(chosen, gradients)
    left = (objective * (objective - of_chosen)).sum(1)
    halves = objective.square().sum(1) / 2 - of_chosen.square().sum(1) / 2
    gap = (objective - of_cluster).square().sum(1)
    return Sides(left, halves + gap + (of_cluster - of_chosen).square().sum(1))


def _mean_over(ids: Tensor, gradients: Tensor) -> Tensor:
    """Return the mean gradient `[B, p]` of the clients `ids` among all `[B, N, p]`."""
    weights = mean_weights(ids, gradients.shape[1])
    return torch.einsum("bn,bni->bi", weights, gradients)


def lemma_3(w: Tensor, path: LocalPath, step: int, lr: Tensor) -> Sides:
    """Return Lemma 3 in expectation, with the smallest G^2 that Assumption 2 allows."""
    second_moment = path.gradient_square[:, :, : max(step, 1)].amax((1, 2))
    return Sides(distance_square(w, path, step).mean(1), (step * lr).square() * second_moment)


def distance_square(w: Tensor, path: LocalPath, step: int) -> Tensor:
    """Return E ||W - W_{n,j}||^2 of every client `[B, V]`."""
    model = path.models[step]
    squared_mean = (model.mean - w[:, None]).square().sum(-1)
    return squared_mean + model.covariance.diagonal(dim1=-2, dim2=-1).sum(-1)


def sampled_distance(
    problem: Quadratics, w: Tensor, ids: Tensor, local: LocalSgd, seed: int
) -> Tensor:
    """Return the mean over clients of ||W - W_{n,k}||^2 for one draw of Gaussian noise `[B]`."""
    clients = problem.subset(ids)
    dim = clients.centre.shape[-1]
    model = w[:, None].expand_as(clients.centre)
    scale = (local.noise / dim).sqrt()[:, None, None]
    step_size = local.lr[:, None, None]
    source = rng.generator(seed, "quadratic-noise")
    for _ in range(local.steps):
        gradient = torch.einsum("bvij,bvj->bvi", clients.curvature, model - clients.centre)
        noise = torch.randn(clients.centre.shape, generator=source, dtype=torch.double)
        model = model - step_size * (gradient + scale * noise)
    return (model - w[:, None]).square().sum(-1).mean(1)


def lemma_4_top(spread: Tensor, q: QConstants[Tensor]) -> Tensor:
    """Return what the proof of Lemma 4 gives for the K largest Q-values: no division by c."""
    by_spread = spread * q.smoothness * 2 / q.mu
    return by_spread + q.delta * (q.smoothness + q.mu) * 4 / (q.mu * q.mu)


def any_choice(spread: Tensor, ratio: float) -> Tensor:
    """Return the bound that holds for every choice of a share `ratio` of the visible clients."""
    return spread * ((1 - ratio) / ratio)


def deviation(gradients: Tensor, chosen: Tensor) -> Tensor:
    """Return ||grad F_C - grad F_S||^2 for chosen positions `[B, K]` of gradients `[B, V, p]`."""
    instance = torch.arange(len(gradients))[:, None]
    return (gradients.mean(1) - gradients[instance, chosen].mean(1)).square().sum(1)


def intra_variance(gradients: Tensor) -> Tensor:
    """Return Gamma^2 of gradients `[B, V, p]`."""
    return (gradients - gradients.mean(1, keepdim=True)).square().sum(2).mean(1)


def all_deviations(gradients: Tensor, size: int) -> Tensor:
    """Return the deviation of every subset of `size` clients `[B, subsets]`."""
    positions = itertools.combinations(range(gradients.shape[1]), size)
    means = gradients[:, torch.tensor(list(positions))].mean(2)  # [B, subsets, p]
    return (gradients.mean(1)[:, None] - means).square().sum(-1)
