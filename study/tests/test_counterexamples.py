"""The smallest problems on which statements fail as printed; docs/theory.md gives them in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from exact_theory import lemmas
from exact_theory.quadratics import Quadratics
from exact_theory.training import LocalPath, LocalSgd, RandomPoint, aggregate, local_path
from fedglimpse.theory import bound
from fedglimpse.theory.bound import Constants, QConstants

AT_ZERO = torch.zeros(1, 1, dtype=torch.double)


def scalars(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.double)


def one_dimension(curvatures: list[float], gradients_at_zero: list[float]) -> Quadratics:
    """Clients on the line by their curvature and their gradient at w = 0; curvature not 0."""
    curvature = scalars(*curvatures)
    centre = -scalars(*gradients_at_zero) / curvature
    return Quadratics(curvature.view(1, -1, 1, 1), centre.view(1, -1, 1))


def path_of_both(problem: Quadratics, lr: float, steps: int) -> LocalPath:
    """Local SGD without noise of the two clients, started at w = 0."""
    start = RandomPoint.fixed(AT_ZERO)
    return local_path(
        problem, start, torch.tensor([[0, 1]]), LocalSgd(steps, scalars(lr), scalars(0.0))
    )


def test_lemma_1_fails_for_a_single_client() -> None:
    """Gradients 2 and 0, both visible, before any local step: 1 <= 1/4 is claimed."""
    problem = one_dimension([1.0, 1.0], [2.0, 0.0])
    path = path_of_both(problem, lr=0.1, steps=1)
    sides = lemmas.lemma_1(problem, AT_ZERO, path, 0, problem.smoothness(), averaged=False)
    assert (float(sides.left), float(sides.right)) == pytest.approx((1.0, 0.25))
    assert bool(
        lemmas.lemma_1(problem, AT_ZERO, path, 0, problem.smoothness(), averaged=True).holds
    )


def test_lemma_1_needs_every_client_to_be_smooth() -> None:
    """F_1 = (w + 1/2)^2, F_2 = 0: F is 1-smooth, F_1 only 2-smooth; 2/16 <= 3/32 is claimed."""
    problem = one_dimension([2.0, 1e-12], [1.0, 0.0])
    path = path_of_both(problem, lr=0.25, steps=1)
    assert float(problem.objective_smoothness()) == pytest.approx(1.0)
    printed = lemmas.lemma_1(
        problem, AT_ZERO, path, 1, problem.objective_smoothness(), averaged=True
    )
    assert (float(printed.left), float(printed.right)) == pytest.approx((2 / 16, 3 / 32))
    assert bool(
        lemmas.lemma_1(problem, AT_ZERO, path, 1, problem.smoothness(), averaged=True).holds
    )


def test_lemma_3_holds_in_the_mean_only() -> None:
    """Noise of 2 in one case of five, else -1/2: G^2 = 1, and one step moves by 4 eta^2."""
    values = scalars(2.0, -0.5)
    chances = scalars(0.2, 0.8)
    lr = 0.1
    assert float(values @ chances) == pytest.approx(0.0)
    second_moment = float(values.square() @ chances)
    moved = (lr * values).square()
    assert float(moved[0]) == pytest.approx(4 * lr**2 * second_moment)
    assert float(moved @ chances) <= lr**2 * second_moment + 1e-12


def test_the_proof_confuses_gradients_at_local_and_global_models() -> None:
    """||sum of local gradients||^2 <= k^2 ||grad F_S||^2 is used; here grad F_S = 0."""
    problem = one_dimension([1.0, 1e-12], [1.0, -1.0])
    path = path_of_both(problem, lr=0.5, steps=2)
    moved = float(path.models[2].mean.mean())
    assert float(problem.gradients(AT_ZERO).mean()) == pytest.approx(0.0)
    assert moved == pytest.approx(0.125)  # eta^2 / 2: the models moved although nothing pulls


def test_noise_of_several_steps_is_not_independent() -> None:
    """Variance k sigma^2 eta^2 is claimed; a client of curvature -1 amplifies its first noise."""
    problem = one_dimension([-1.0], [0.0])
    local = LocalSgd(steps=2, lr=scalars(0.5), noise=scalars(1.0))
    start = RandomPoint.fixed(AT_ZERO)
    path = local_path(problem, start, torch.tensor([[0]]), local)
    variance = float(aggregate(problem, start, path, local).covariance)
    assert variance == pytest.approx(0.25 * (1.5**2 + 1))
    assert variance > 2 * 0.25


def test_the_theorem_fails_where_only_the_mean_is_smooth() -> None:
    """Two clients on which FedAvg never moves: all assumptions hold, and 1 <= 0.18 is claimed.

    At w = 0 the gradients are 9/8 and 7/8, the curvatures L ± b; two steps with eta = 1 move the
    clients by opposite amounts. All numbers are sums of powers of 2, so that nothing is rounded.
    """
    smooth = 1 / 256
    rounds = 10_000
    bend = (2 - smooth) * 8
    curvature = scalars(smooth + bend, smooth - bend)
    gradient_at_zero = scalars(9 / 8, 7 / 8)
    local_models = torch.zeros(2, dtype=torch.double)
    squares = []
    for _ in range(2):  # k = 2 local steps from w = 0, eta = 1
        step = gradient_at_zero + curvature * local_models
        squares.append(step.square().max())
        local_models = local_models - step
    assert float(local_models.mean()) == 0.0  # so that every round starts where the first did
    constants = Constants[float](
        rounds=rounds,
        steps=2,
        lr=1.0,
        start=1 / (2 * smooth),  # F has gradient 1 and curvature L
        gap=0.0,
        spread=1 / 64,
        deviation=0.0,
        second_moment=float(max(squares)),
        noise=0.0,
        smoothness=smooth,
        visible=2,
        ratio=1.0,
        per_selected=0.5,
    )
    q = QConstants(0.0, 1.0, 1.0)  # Q(x) = -1/2 (x - 1)^2, and grad F_C = 1 is its maximum
    measured = float(gradient_at_zero.mean()) ** 2
    assert constants.smoothness * constants.steps * constants.lr < 0.01
    assert measured == 1.0
    assert bound.printed(constants, q).total == pytest.approx(0.18, abs=0.01)
    with_clients = replace(constants, smoothness=float(curvature.abs().max()))
    assert with_clients.smoothness * 2 > 1  # what the repaired statement asks for is not met


def noise_floor(sizes: list[int], rounds: int, lr: float) -> tuple[float, float]:
    """Identical clients w^2/2 with noise 1, all visible ones chosen: mean square, largest."""
    square = 0.0
    mean_square = 0.0
    largest = 0.0
    for t in range(rounds):
        mean_square += square / rounds
        largest = max(largest, square)
        square = (1 - lr) ** 2 * square + lr**2 / sizes[t % len(sizes)]
    return mean_square, largest


@pytest.mark.parametrize(("largest", "times"), [(16, 1.05), (100, 4.7)])
def test_the_noise_term_needs_the_mean_of_one_over_the_size(largest: int, times: float) -> None:
    """Clusters of 1 and more in turn: with 1 / mean |C| the bound is less than what is measured."""
    lr = 0.01
    rounds = 3000
    measured, highest = noise_floor([1, largest], rounds, lr)
    drift = 4 / 3 * lr**2 * (1 + highest)
    assert measured > times * (2 * lr / ((1 + largest) / 2) + drift)  # as printed
    assert measured <= 2 * lr * (1 + 1 / largest) / 2 + drift  # mean of 1 / |C|


def test_the_choice_must_not_see_the_noise_of_its_own_round() -> None:
    """Two equal clients w^2/2, noise ±1; the larger noisy gradient is chosen."""
    lr = 0.05
    rounds = 3000
    noise_mean = 0.5  # the larger of two signs is +1 in three cases of four
    noise_square = 1.0
    model_mean = 0.0
    model_square = 0.0
    measured = 0.0
    for _ in range(rounds):
        measured += model_square / rounds
        model_square = (1 - lr) ** 2 * model_square - 2 * lr * (1 - lr) * model_mean * noise_mean
        model_square += lr**2 * noise_square
        model_mean = (1 - lr) * model_mean - lr * noise_mean
    second_moment = 1 + model_square + 1  # more than enough
    assert measured > 2 * lr + 4 / 3 * lr**2 * second_moment


@pytest.mark.parametrize("clip", [1.0, 10.0])
def test_a_clipped_q_has_no_quadratic_growth(clip: float) -> None:
    """Q = max(-clip, -x^2/2): the largest mu that fits shrinks with the range of gradients."""
    allowed = []
    for reach in (1.0, 10.0, 100.0, 1000.0):
        x = torch.linspace(-reach, reach, 2001, dtype=torch.double)
        x = x[x != 0]
        q = (-x.square() / 2).clamp(min=-clip)
        allowed.append(float((2 * (0 - q) / x.square()).min()))
    assert allowed == sorted(allowed, reverse=True)
    assert allowed[-1] == pytest.approx(2 * clip / 1000**2)


def test_a_q_clipped_from_above_has_no_growth_at_all() -> None:
    """On the plateau Q(v*) - Q(x) = 0 while x is away from v*."""
    q_at_best, q_elsewhere = (1 - scalars(0.0, 0.5).square()).clamp(max=0.5).tolist()
    assert q_at_best == q_elsewhere
