"""The exact problems are what they say: constants, moments, and the choice they describe."""

from __future__ import annotations

import torch

from fedglimpse.theory.moments import Cloud, aggregate, local_path, mean_square
from fedglimpse.theory.quadratics import Quadratics, draw, shares, subsets


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_gradients_are_those_of_the_value() -> None:
    problem = draw(5, clients=4, dim=3, seed=1, lowest=-1.0)
    w = torch.randn(5, 3, generator=generator(), dtype=torch.double).requires_grad_()
    (gradient,) = torch.autograd.grad(problem.value(w).sum(), w)
    torch.testing.assert_close(problem.gradients(w).mean(1), gradient)


def test_the_optimum_has_no_gradient_and_the_least_value() -> None:
    problem = draw(50, clients=4, dim=3, seed=2, lowest=-1.0)
    best = problem.optimum()
    assert float(problem.gradients(best).mean(1).abs().max()) < 1e-9
    away = torch.randn(50, 3, generator=generator(), dtype=torch.double)
    assert bool((problem.value(best + away) > problem.value(best)).all())


def test_smoothness_is_reached_and_not_passed() -> None:
    problem = draw(200, clients=3, dim=3, seed=3, lowest=-1.0)
    a, b = torch.randn(2, 200, 3, generator=generator(), dtype=torch.double)
    secant = (problem.gradients(a) - problem.gradients(b)).norm(dim=-1).amax(1) / (a - b).norm(
        dim=1
    )
    assert bool((secant <= problem.smoothness() + 1e-9).all())
    assert float((secant / problem.smoothness()).max()) > 0.9


def test_smoothness_of_the_mean_is_below_that_of_the_clients() -> None:
    problem = draw(100, clients=6, dim=3, seed=4, lowest=-1.0)
    assert bool((problem.objective_smoothness() < problem.smoothness()).all())


def test_moments_are_those_of_many_draws() -> None:
    problem = draw(1, clients=4, dim=2, seed=5, lowest=-0.5)
    ids, steps, draws = torch.tensor([[2, 0, 3]]), 3, 200_000
    lr, noise = torch.tensor([0.3], dtype=torch.double), torch.tensor([1.5], dtype=torch.double)
    w = torch.tensor([[1.0, -2.0]], dtype=torch.double)
    path = local_path(problem, Cloud.at(w), ids, lr, steps, noise)
    cloud = aggregate(problem, Cloud.at(w), path, lr, noise)
    source, finals = generator(7), []
    for client in ids[0].tolist():
        local = w.expand(draws, 2)
        for j in range(steps):
            own = (local - problem.centre[0, client]) @ problem.curvature[0, client]
            e = torch.randn(draws, 2, generator=source, dtype=torch.double)
            taken = own + e * (noise / 2).sqrt()
            square = float(path.gradient_square[0, ids[0].tolist().index(client), j])
            assert abs(float(taken.square().sum(1).mean()) / square - 1) < 0.02
            local = local - lr * taken
        finals.append(local)
    drawn = torch.stack(finals).mean(0)  # [draws, 2]
    torch.testing.assert_close(drawn.mean(0), cloud.mean[0], atol=5e-3, rtol=0)
    torch.testing.assert_close(torch.cov(drawn.T), cloud.covariance[0], atol=2e-3, rtol=0.02)
    weights = torch.tensor([[[0.5, -1.0, 0.25, 0.0]]], dtype=torch.double)
    away = drawn[:, None] - problem.centre[0]  # [draws, N, 2]
    each = torch.einsum("nij,dnj->dni", problem.curvature[0], away)
    sums = torch.einsum("n,dni->di", weights[0, 0], each)
    expected = float(mean_square(problem, weights, cloud))
    assert abs(float(sums.square().sum(1).mean()) / expected - 1) < 0.03


def test_shares_average_a_set() -> None:
    ids = subsets(10, clients=6, size=3, source=generator())
    weights = shares(ids, 6)
    assert bool(((weights > 0).sum(1) == 3).all())
    torch.testing.assert_close(weights.sum(1), torch.ones(10, dtype=torch.double))


def test_lifted_clients_keep_their_centres() -> None:
    problem: Quadratics = draw(100, clients=2, dim=3, seed=0, lowest=-1.0)
    assert float(problem.convexity().min()) >= 0.05 - 1e-9
