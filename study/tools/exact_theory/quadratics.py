"""Federated quadratics: exact test problems whose constants are all known.

Client n has F_n(w) = 1/2 (w - m_n)' A_n (w - m_n) and F is the mean over clients. B federations
are computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.theory.bound import QConstants

LEAST_CONVEXITY = 0.05  # smallest eigenvalue of F's curvature in every drawn federation


@dataclass(frozen=True)
class Quadratics:
    """B federations of N quadratic clients in p dimensions, in float64."""

    curvature: Tensor  # [B, N, p, p] A_n, symmetric
    centre: Tensor  # [B, N, p] m_n, the optimum of each client

    @property
    def clients(self) -> int:
        """N."""
        return self.curvature.shape[1]

    def gradients(self, w: Tensor) -> Tensor:
        """Return the gradients of all clients `[B, N, p]` at points `[B, p]`."""
        offset = w[:, None] - self.centre
        return torch.einsum("bnij,bnj->bni", self.curvature, offset)

    def gradients_of(self, ids: Tensor, w: Tensor) -> Tensor:
        """Return the gradients of the clients `ids` `[B, V]` at points `[B, p]`: `[B, V, p]`."""
        instance = torch.arange(len(ids))[:, None]
        return self.gradients(w)[instance, ids]

    def subset(self, ids: Tensor) -> Quadratics:
        """Return the federations made of the clients `ids` `[B, V]` alone."""
        instance = torch.arange(len(ids))[:, None]
        return Quadratics(self.curvature[instance, ids], self.centre[instance, ids])

    def value(self, w: Tensor) -> Tensor:
        """Return F `[B]` at points `[B, p]`."""
        offset = w[:, None] - self.centre
        values = 0.5 * torch.einsum("bni,bnij,bnj->bn", offset, self.curvature, offset)
        return values.mean(1)

    def optimum(self) -> Tensor:
        """Return the minimiser of F `[B, p]`; F must be strictly convex."""
        pull = torch.einsum("bnij,bnj->bni", self.curvature, self.centre).mean(1)
        return torch.linalg.solve(self.curvature.mean(1), pull)

    def smoothness(self) -> Tensor:
        """Return the smallest L for which every client is L-smooth `[B]`."""
        return torch.linalg.eigvalsh(self.curvature).abs().amax((1, 2))

    def objective_smoothness(self) -> Tensor:
        """Return the smallest L for which F alone is, as Assumption 1(i) is printed `[B]`."""
        return torch.linalg.eigvalsh(self.curvature.mean(1)).abs().amax(1)

    def convexity(self) -> Tensor:
        """Return the smallest eigenvalue of F's curvature `[B]`."""
        return torch.linalg.eigvalsh(self.curvature.mean(1)).amin(1)


class QuadraticQ(NamedTuple):
    """A concave quadratic Q(x) = -1/2 (x - best)' shape (x - best) of gradients x."""

    shape: Tensor  # [B, p, p]
    best: Tensor  # [B, p] v*, the gradient that Q likes most

    def q(self, x: Tensor) -> Tensor:
        """Return Q `[B, V]` of gradients `[B, V, p]`; its maximum is 0."""
        offset = x - self.best[:, None]
        return -0.5 * torch.einsum("bvi,bij,bvj->bv", offset, self.shape, offset)

    def largest(self, gradients: Tensor, count: int) -> Tensor:
        """Return the positions `[B, K]` of the `count` largest Q among gradients `[B, V, p]`."""
        return self.q(gradients).argsort(1, descending=True)[:, :count]

    def delta(self, cluster: Tensor) -> Tensor:
        """Return Delta_Q `[B]` at the cluster's mean gradient `[B, p]`."""
        return -self.q(cluster[:, None])[:, 0]

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return mu of quadratic growth and L_Q `[B]`."""
        eigenvalues = torch.linalg.eigvalsh(self.shape)
        return eigenvalues.amin(1), eigenvalues.amax(1)

    def constants(self, cluster: Tensor) -> QConstants[Tensor]:
        """Return Delta_Q at the cluster's mean gradient `[B, p]`, and the exact mu and L_Q."""
        mu, smoothness = self.limits()
        return QConstants(self.delta(cluster), mu, smoothness)


def draw(
    instances: int, clients: int, dim: int, seed: int, *, lowest: float = 0.1, spread: float = 1.0
) -> Quadratics:
    """Draw random federations.

    Args:
        instances: B.
        clients: N.
        dim: p.
        seed: of the draw.
        lowest: eigenvalues are uniform in [lowest, 1]; negative: clients need not be convex. Where
            F is not convex, all clients are lifted by as much as makes it so.
        spread: standard deviation of the centres.
    """
    source = rng.generator(seed, "quadratics", clients, dim)
    shape = (instances, clients, dim)
    basis_draw = torch.randn((*shape, dim), generator=source, dtype=torch.double)
    basis = torch.linalg.qr(basis_draw)[0]
    uniform = torch.rand(shape, generator=source, dtype=torch.double)
    eigenvalues = lowest + (1 - lowest) * uniform
    curvature = torch.einsum("bnij,bnj,bnkj->bnik", basis, eigenvalues, basis)
    centre = spread * torch.randn(shape, generator=source, dtype=torch.double)
    unlifted = Quadratics(curvature, centre)
    lift = (LEAST_CONVEXITY - unlifted.convexity()).clamp(min=0)  # [B]
    identity = torch.eye(dim, dtype=torch.double)
    return Quadratics(curvature + lift[:, None, None, None] * identity, centre)


def subsets(instances: int, clients: int, size: int, source: torch.Generator) -> Tensor:
    """Return a random set of `size` clients for every instance `[B, size]`."""
    return torch.rand(instances, clients, generator=source).argsort(1)[:, :size]


def mean_weights(ids: Tensor, clients: int) -> Tensor:
    """Return the weights of a set's mean over all clients: `[B, V]` ids to `[B, N]`."""
    weights = torch.zeros(len(ids), clients, dtype=torch.double)
    return weights.scatter(1, ids, 1 / ids.shape[1])
