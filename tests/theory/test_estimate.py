"""The estimates are what the theorem's symbols say, checked against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedglimpse.config.loading import resolve
from fedglimpse.data.dataset import as_input
from fedglimpse.runs.build import build_world
from fedglimpse.simulation.world import World
from fedglimpse.theory.estimate import (
    LaneProbe,
    Measurement,
    client_gradient,
    examples_of,
    implied_q,
)
from theory.small_run import SMALL


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(resolve(SMALL))


def record(**changes: Any) -> dict[str, Any]:
    plain = {"round": 0, "visible": [1, 4, 5, 7], "selected": [4, 7], "weights": [0.5, 0.5]}
    return plain | {"rejected": []} | changes


def probe_of(world: World) -> LaneProbe:
    population = world.lanes[0].population
    return LaneProbe(world.evaluator, population, seed=0, lr=0.05, batch_size=16)


def measured(world: World, **changes: Any) -> Measurement:
    point = probe_of(world).measure(world.states[0], record(**changes))
    assert point is not None
    return point


def gradients(world: World) -> torch.Tensor:
    population = world.lanes[0].population
    x, y = population.dataset.x_train, population.dataset.y_train
    rows = []
    for client in range(population.num_clients):
        client_rows = population.rows[client]
        rows.append(world.evaluator.mean_gradient(world.states[0], x[client_rows], y[client_rows]))
    return torch.stack(rows).double()


def test_a_point_is_made_of_full_gradients(world: World) -> None:
    point = measured(world)
    of_clients = gradients(world)
    objective = of_clients.mean(0)
    cluster = of_clients[[1, 4, 5, 7]].mean(0)
    close = {"rel": 1e-4}
    assert point.gradient == pytest.approx(float(objective.square().sum()), **close)
    assert point.gap == pytest.approx(float((objective - cluster).square().sum()), **close)
    spread = (of_clients[[1, 4, 5, 7]] - cluster).square().sum(1).mean()
    assert point.spread == pytest.approx(float(spread), **close)
    deviation = (cluster - of_clients[[4, 7]].mean(0)).square().sum()
    assert point.deviation == pytest.approx(float(deviation), **close)
    assert point.weighted_deviation == pytest.approx(point.deviation, **close)
    assert point.random_deviation == pytest.approx(float(spread) * 2 / (2 * 3), **close)
    assert (point.visible, point.selected) == (4, 2)


def test_choosing_everyone_leaves_no_deviation(world: World) -> None:
    point = measured(world, selected=[1, 4, 5, 7], weights=[0.25] * 4)
    assert point.deviation == pytest.approx(0.0, abs=1e-10)
    assert point.random_deviation == 0.0


def test_weights_count_in_the_weighted_deviation_alone(world: World) -> None:
    point = measured(world, weights=[3.0, 1.0])
    of_clients = gradients(world)
    chosen = 0.75 * of_clients[4] + 0.25 * of_clients[7]
    expected = float((of_clients[[1, 4, 5, 7]].mean(0) - chosen).square().sum())
    assert point.weighted_deviation == pytest.approx(expected, rel=1e-4)
    assert point.deviation == pytest.approx(measured(world).deviation)


def test_a_round_that_chose_nobody_is_no_point(world: World) -> None:
    idle = record(selected=[], weights=[])
    assert probe_of(world).measure(world.states[0], idle) is None


def test_noise_is_the_variance_over_batches(world: World) -> None:
    population = world.lanes[0].population
    state = world.states[0]
    x, y = examples_of(population, 3, 0, torch.Generator().manual_seed(0))
    estimate = client_gradient(world.evaluator, state, x, y, 16)
    of_batches = [
        world.evaluator.mean_gradient(state, batch_x, batch_y)
        for batch_x, batch_y in zip(x.split(16), y.split(16), strict=True)
        if len(batch_y) > 1
    ]
    torch.testing.assert_close(
        estimate.gradient, world.evaluator.mean_gradient(state, x, y), rtol=1e-4, atol=1e-6
    )
    noise = torch.stack([(g - estimate.gradient).square().sum() for g in of_batches]).mean()
    moment = torch.stack([g.square().sum() for g in of_batches]).mean()
    assert estimate.noise == pytest.approx(float(noise), rel=1e-4)
    assert estimate.second_moment == pytest.approx(float(moment), rel=1e-4)
    loss = world.evaluator.score(state, x, y).loss
    assert estimate.loss == pytest.approx(loss, rel=1e-4)


def test_one_batch_has_no_noise_and_a_last_batch_of_one_does_not_count(world: World) -> None:
    x, y = examples_of(world.lanes[0].population, 3, 17, torch.Generator().manual_seed(0))
    assert client_gradient(world.evaluator, world.states[0], x, y, 17).noise == pytest.approx(0.0)
    split = client_gradient(world.evaluator, world.states[0], x, y, 16)
    first = world.evaluator.mean_gradient(world.states[0], x[:16], y[:16])
    assert split.second_moment == pytest.approx(float(first.square().sum()), rel=1e-4)


def test_smoothness_of_a_linear_model_stays_below_the_largest_it_can_be() -> None:
    """Softmax regression: the Hessian's norm is at most half the largest squared input, plus 1."""
    world = build_world(resolve({**SMALL, "model.name": "theory.linear_model:digits_linear"}))
    point = measured(world)
    data = world.dataset
    limit = 0.5 * (as_input(data.x_train).flatten(1).square().sum(1).max() + 1)
    assert 0 < point.smoothness <= float(limit)


def test_the_largest_noise_and_moment_are_taken(world: World) -> None:
    of_four = measured(world)
    of_two = measured(world, visible=[4, 7])
    assert of_four.noise >= of_two.noise > 0
    assert of_four.second_moment >= of_two.second_moment > of_two.noise


def test_implied_constants_of_a_round_quadratic_are_exact() -> None:
    points = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    q = 7 - 0.5 * 3.0 * (points - points[2]).square().sum(1)  # mu = L_Q = 3, best at client 2
    found = implied_q(points, q)
    assert found["mu"] == pytest.approx(3.0)
    assert found["l_q"] == pytest.approx(3.0)
    assert found["delta_q"] == pytest.approx(float(7 - q.mean()))


def test_implied_constants_keep_both_inequalities() -> None:
    source = torch.Generator().manual_seed(1)
    points = torch.randn(6, 4, generator=source, dtype=torch.double)
    q = torch.randn(6, generator=source, dtype=torch.double)
    found, best = implied_q(points, q), int(q.argmax())
    assert found["mu"] is not None
    assert found["l_q"] is not None
    away = (points - points[best]).square().sum(1)
    lost = q[best] - q
    assert bool((away * found["mu"] / 2 <= lost + 1e-9).all())
    assert bool((away * found["l_q"] / 2 >= lost - 1e-9).all())


def test_equal_gradients_imply_nothing() -> None:
    assert implied_q(torch.ones(3, 2), torch.tensor([1.0, 2.0, 3.0]))["mu"] is None


def test_q_values_belong_to_visible_clients_that_were_not_rejected(world: World) -> None:
    point = measured(world, q=[0.1, 0.9, 0.3], rejected=[5])
    assert point.delta_q == pytest.approx(0.9 - 1.3 / 3)
    assert measured(world, q=[0.1, 0.9], rejected=[]).delta_q is None
