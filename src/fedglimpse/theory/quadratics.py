"""Federated quadratics: exact test problems whose constants are all known.

Client n has F_n(w) = 1/2 (w - m_n)' A_n (w - m_n) and F is the mean over clients. B instances are
computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse import rng


@dataclass(frozen=True)
class Quadratics:
    """B federations of N quadratic clients in p dimensions, in float64."""

    curvature: Tensor  # [B, N, p, p] symmetric
    centre: Tensor  # [B, N, p]

    @property
    def clients(self) -> int:
        """N."""
        return self.curvature.shape[1]

    def gradients(self, w: Tensor) -> Tensor:
        """Return the gradients of all clients `[B, N, p]` at points `[B, p]`."""
        return torch.einsum("bnij,bnj->bni", self.curvature, w[:, None] - self.centre)

    def value(self, w: Tensor) -> Tensor:
        """Return F `[B]` at points `[B, p]`."""
        away = w[:, None] - self.centre
        return 0.5 * torch.einsum("bni,bnij,bnj->bn", away, self.curvature, away).mean(1)

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
    shape = (instances, clients, dim, dim)
    basis = torch.linalg.qr(torch.randn(shape, generator=source, dtype=torch.double))[0]
    values = lowest + (1 - lowest) * torch.rand(shape[:3], generator=source, dtype=torch.double)
    curvature = torch.einsum("bnij,bnj,bnkj->bnik", basis, values, basis)
    centre = spread * torch.randn(shape[:3], generator=source, dtype=torch.double)
    found = Quadratics(curvature, centre)
    lift = (0.05 - found.convexity()).clamp(min=0)  # [B]
    eye = torch.eye(dim, dtype=torch.double)
    return Quadratics(curvature + lift[:, None, None, None] * eye, centre)


def subsets(instances: int, clients: int, size: int, source: torch.Generator) -> Tensor:
    """Return a random set of `size` clients for every instance `[B, size]`."""
    return torch.rand(instances, clients, generator=source).argsort(1)[:, :size]


def shares(ids: Tensor, clients: int) -> Tensor:
    """Return the weights of a set's mean over all clients: `[B, V]` ids to `[B, N]`."""
    weights = torch.zeros(len(ids), clients, dtype=torch.double)
    return weights.scatter(1, ids, 1 / ids.shape[1])
