"""The exact problems are what they say: constants, moments, and the choice they describe."""

from __future__ import annotations

import torch

from exact_theory.quadratics import Quadratics, draw, mean_weights, subsets
from exact_theory.training import LocalSgd, RandomPoint, aggregate, local_path, mean_square


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
    offset = torch.randn(50, 3, generator=generator(), dtype=torch.double)
    assert bool((problem.value(best + offset) > problem.value(best)).all())


def test_smoothness_is_reached_and_not_passed() -> None:
    problem = draw(200, clients=3, dim=3, seed=3, lowest=-1.0)
    a, b = torch.randn(2, 200, 3, generator=generator(), dtype=torch.double)
    change = (problem.gradients(a) - problem.gradients(b)).norm(dim=-1).amax(1)
    secant = change / (a - b).norm(dim=1)
    assert bool((secant <= problem.smoothness() + 1e-9).all())
    assert float((secant / problem.smoothness()).max()) > 0.9


def test_smoothness_of_the_mean_is_below_that_of_the_clients() -> None:
    problem = draw(100, clients=6, dim=3, seed=4, lowest=-1.0)
    assert bool((problem.objective_smoothness() < problem.smoothness()).all())


def test_moments_are_those_of_many_draws() -> None:
    problem = draw(1, clients=4, dim=2, seed=5, lowest=-0.5)
    ids = torch.tensor([[2, 0, 3]])
    draws = 200_000
    lr = torch.tensor([0.3], dtype=torch.double)
    noise = torch.tensor([1.5], dtype=torch.double)
    local = LocalSgd(steps=3, lr=lr, noise=noise)
    w = torch.tensor([[1.0, -2.0]], dtype=torch.double)
    path = local_path(problem, RandomPoint.fixed(w), ids, local)
    expected = aggregate(problem, RandomPoint.fixed(w), path, local)
    source = generator(7)
    final_models = []
    for position, client in enumerate(ids[0].tolist()):
        models = w.expand(draws, 2)
        for step in range(local.steps):
            gradients = (models - problem.centre[0, client]) @ problem.curvature[0, client]
            unit_noise = torch.randn(draws, 2, generator=source, dtype=torch.double)
            gradients = gradients + unit_noise * (noise / 2).sqrt()
            mean_of_squares = float(gradients.square().sum(1).mean())
            assert abs(mean_of_squares / float(path.gradient_square[0, position, step]) - 1) < 0.02
            models = models - lr * gradients
        final_models.append(models)
    drawn = torch.stack(final_models).mean(0)  # [draws, 2]
    torch.testing.assert_close(drawn.mean(0), expected.mean[0], atol=5e-3, rtol=0)
    torch.testing.assert_close(torch.cov(drawn.T), expected.covariance[0], atol=2e-3, rtol=0.02)

    weights = torch.tensor([[[0.5, -1.0, 0.25, 0.0]]], dtype=torch.double)
    offsets = drawn[:, None] - problem.centre[0]  # [draws, N, 2]
    client_gradients = torch.einsum("nij,dnj->dni", problem.curvature[0], offsets)
    sums = torch.einsum("n,dni->di", weights[0, 0], client_gradients)
    square = float(mean_square(problem, weights, expected))
    assert abs(float(sums.square().sum(1).mean()) / square - 1) < 0.03


def test_mean_weights_average_a_set() -> None:
    ids = subsets(10, clients=6, size=3, source=generator())
    weights = mean_weights(ids, 6)
    assert bool(((weights > 0).sum(1) == 3).all())
    torch.testing.assert_close(weights.sum(1), torch.ones(10, dtype=torch.double))


def test_lifted_objectives_are_convex() -> None:
    problem: Quadratics = draw(100, clients=2, dim=3, seed=0, lowest=-1.0)
    assert float(problem.convexity().min()) >= 0.05 - 1e-9
