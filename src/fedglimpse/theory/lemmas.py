"""Both sides of Lemmas 1 to 4 on quadratics, exactly: `left <= right` is what they claim."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.theory.bound import QConstants
from fedglimpse.theory.moments import Cloud, Path, local_path
from fedglimpse.theory.quadratics import Quadratics, shares


class Sides(NamedTuple):
    """Two sides of an inequality, instance by instance."""

    left: Tensor  # [B]
    right: Tensor  # [B]

    @property
    def holds(self) -> Tensor:
        """Where left <= right, up to rounding `[B]`."""
        return self.left <= self.right + 1e-9 * (1 + self.right.abs())


def lemma_1(
    problem: Quadratics, w: Tensor, path: Path, step: int, smoothness: Tensor, *, averaged: bool
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
    row = torch.arange(len(w))[:, None]
    whole = problem.gradients(w).mean(1)  # [B, p]
    cluster = problem.gradients(w)[row, path.ids].mean(1)
    away = path.models[step].mean - problem.centre[row, path.ids]
    local = torch.einsum("bvij,bvj->bvi", problem.curvature[row, path.ids], away)
    inner = torch.einsum("bi,bvi->bv", whole, cluster[:, None] - local)
    left = inner.mean(1) if averaged else inner.amax(1)
    drift = distance_square(w, path, step).mean(1)
    return Sides(left, whole.square().sum(1) / 4 + smoothness.square() * drift)


def lemma_2(problem: Quadratics, w: Tensor, cluster: Tensor, chosen: Tensor) -> Sides:
    """Return Lemma 2 for a cluster `[B, V]` and the chosen `[B, K]`, with the exact d^2."""
    gradients = problem.gradients(w)
    whole = gradients.mean(1)
    of_cluster, of_chosen = (
        torch.einsum("bn,bni->bi", shares(ids, problem.clients), gradients)
        for ids in (cluster, chosen)
    )
    left = (whole * (whole - of_chosen)).sum(1)
    halves = whole.square().sum(1) / 2 - of_chosen.square().sum(1) / 2
    gap = (whole - of_cluster).square().sum(1)
    return Sides(left, halves + gap + (of_cluster - of_chosen).square().sum(1))


def lemma_3(w: Tensor, path: Path, step: int, lr: Tensor) -> Sides:
    """Return Lemma 3 in expectation, with the smallest G^2 that Assumption 2 allows."""
    second_moment = path.gradient_square[:, :, : max(step, 1)].amax((1, 2))
    return Sides(distance_square(w, path, step).mean(1), (step * lr).square() * second_moment)


def distance_square(w: Tensor, path: Path, step: int) -> Tensor:
    """Return E ||W - W_{n,j}||^2 of every client `[B, V]`."""
    cloud = path.models[step]
    moved = (cloud.mean - w[:, None]).square().sum(-1)
    return moved + cloud.covariance.diagonal(dim1=-2, dim2=-1).sum(-1)


def drawn_distance(
    problem: Quadratics,
    w: Tensor,
    ids: Tensor,
    lr: Tensor,
    steps: int,
    noise: Tensor,
    seed: int,
) -> Tensor:
    """Return the mean over clients of ||W - W_{n,k}||^2 for one draw of Gaussian noise `[B]`."""
    row = torch.arange(len(ids))[:, None]
    curvature, centre = problem.curvature[row, ids], problem.centre[row, ids]
    local = w[:, None].expand_as(centre)
    scale = (noise / centre.shape[-1]).sqrt()[:, None, None]
    source = rng.generator(seed, "quadratic-noise")
    for _ in range(steps):
        gradient = torch.einsum("bvij,bvj->bvi", curvature, local - centre)
        drawn = torch.randn(centre.shape, generator=source, dtype=torch.double)
        local = local - lr[:, None, None] * (gradient + scale * drawn)
    return (local - w[:, None]).square().sum(-1).mean(1)


class Growth(NamedTuple):
    """A concave quadratic Q(x) = -1/2 (x - best)' shape (x - best) of gradients."""

    shape: Tensor  # [B, p, p]
    best: Tensor  # [B, p] v*

    def q(self, x: Tensor) -> Tensor:
        """Return Q `[B, V]` of gradients `[B, V, p]`; its maximum is 0."""
        away = x - self.best[:, None]
        return -0.5 * torch.einsum("bvi,bij,bvj->bv", away, self.shape, away)

    def constants(self, cluster: Tensor) -> QConstants[Tensor]:
        """Return Delta_Q at the cluster's gradient `[B, p]`, and the exact mu and L_Q."""
        mu, smoothness = self.limits()
        return QConstants(-self.q(cluster[:, None])[:, 0], mu, smoothness)

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return mu of quadratic growth and L_Q `[B]`."""
        values = torch.linalg.eigvalsh(self.shape)
        return values.amin(1), values.amax(1)


def deviation(gradients: Tensor, chosen: Tensor) -> Tensor:
    """Return ||grad F_C - grad F_S||^2 for chosen positions `[B, K]` of gradients `[B, V, p]`."""
    row = torch.arange(len(gradients))[:, None]
    return (gradients.mean(1) - gradients[row, chosen].mean(1)).square().sum(1)


def intra_variance(gradients: Tensor) -> Tensor:
    """Return Gamma^2 of gradients `[B, V, p]`."""
    return (gradients - gradients.mean(1, keepdim=True)).square().sum(2).mean(1)


def all_deviations(gradients: Tensor, size: int) -> Tensor:
    """Return the deviation of every subset of `size` clients `[B, subsets]`."""
    sets = torch.tensor(list(itertools.combinations(range(gradients.shape[1]), size)))
    means = gradients[:, sets].mean(2)  # [B, subsets, p]
    return (gradients.mean(1)[:, None] - means).square().sum(-1)


def path_from(
    problem: Quadratics, w: Tensor, ids: Tensor, lr: Tensor, steps: int, noise: Tensor
) -> Path:
    """Return local paths from a point that is not random."""
    return local_path(problem, Cloud.at(w), ids, lr, steps, noise)
