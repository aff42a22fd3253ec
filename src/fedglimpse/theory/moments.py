"""Exact first and second moments of local SGD on quadratics with additive noise.

Stochastic gradients are grad F_n(w) + e with independent, isotropic e of variance sigma^2. All
models stay Gaussian-like in the sense that mean and covariance follow linear recursions, so that
every expectation of the theorem is computed, none is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse.theory.quadratics import Quadratics


@dataclass(frozen=True)
class Cloud:
    """A random point of every instance."""

    mean: Tensor  # [B, ..., p]
    covariance: Tensor  # [B, ..., p, p]

    @staticmethod
    def at(point: Tensor) -> Cloud:
        """Return points `[B, p]` that are not random."""
        dim = point.shape[-1]
        return Cloud(point, point.new_zeros(*point.shape, dim))


def mean_square(problem: Quadratics, weights: Tensor, cloud: Cloud) -> Tensor:
    """Return E ||sum_n weights_n grad F_n(W)||^2.

    Args:
        problem: the clients.
        weights: of the clients, for M sums.  # [B, M, N]
        cloud: of W.  # [B, p]

    Returns:
        One value for each sum.  # [B, M]
    """
    matrix = torch.einsum("bmn,bnij->bmij", weights, problem.curvature)
    offset = torch.einsum("bmn,bnij,bnj->bmi", weights, problem.curvature, problem.centre)
    mean = torch.einsum("bmij,bj->bmi", matrix, cloud.mean) - offset
    scatter = torch.einsum("bmij,bjk,bmik->bm", matrix, cloud.covariance, matrix)
    return mean.square().sum(-1) + scatter


@dataclass(frozen=True)
class Path:
    """Local models W_{n,0}, ..., W_{n,k} of some clients, started from the same random W."""

    ids: Tensor  # [B, V]
    models: list[Cloud]  # k + 1 clouds of [B, V, p]
    gradient_square: Tensor  # [B, V, k] E ||stochastic gradient||^2 before each step


def local_path(
    problem: Quadratics, start: Cloud, ids: Tensor, lr: Tensor, steps: int, noise: Tensor
) -> Path:
    """Follow local SGD of some clients.

    Args:
        problem: the clients.
        start: the global model.  # [B, p]
        ids: who trains.  # [B, V]
        lr: eta.  # [B]
        steps: k.
        noise: sigma^2.  # [B]
    """
    row = torch.arange(len(ids))[:, None]
    curvature, centre = problem.curvature[row, ids], problem.centre[row, ids]  # [B, V, ...]
    dim = centre.shape[-1]
    eye = torch.eye(dim, dtype=torch.double)
    shrink = eye - lr[:, None, None, None] * curvature
    fresh = (lr.square() * noise / dim)[:, None, None, None] * eye
    mean = start.mean[:, None].expand_as(centre)
    covariance = start.covariance[:, None].expand_as(curvature)
    models, squares = [Cloud(mean, covariance)], []
    for _ in range(steps):
        gradient = torch.einsum("bvij,bvj->bvi", curvature, mean - centre)
        scatter = torch.einsum("bvij,bvjk,bvik->bv", curvature, covariance, curvature)
        squares.append(gradient.square().sum(-1) + scatter + noise[:, None])
        mean = mean - lr[:, None, None] * gradient
        covariance = shrink @ covariance @ shrink + fresh
        models.append(Cloud(mean, covariance))
    return Path(ids, models, torch.stack(squares, -1))


def aggregate(problem: Quadratics, start: Cloud, path: Path, lr: Tensor, noise: Tensor) -> Cloud:
    """Return the mean of the last local models: the next global model.

    Noise of clients is independent, the start is shared: covariances do not simply average.
    """
    row = torch.arange(len(path.ids))[:, None]
    curvature = problem.curvature[row, path.ids]
    dim, steps, count = curvature.shape[-1], len(path.models) - 1, path.ids.shape[1]
    eye = torch.eye(dim, dtype=torch.double)
    shrink = eye - lr[:, None, None, None] * curvature
    shared = torch.linalg.matrix_power(shrink, steps).mean(1)  # [B, p, p]
    powers = [torch.linalg.matrix_power(shrink, 2 * i) for i in range(steps)]
    own = torch.stack(powers).sum(0).mean(1) / count  # [B, p, p]
    scale = (lr.square() * noise / dim)[:, None, None]
    covariance = shared @ start.covariance @ shared.mT + scale * own
    return Cloud(path.models[-1].mean.mean(1), covariance)
