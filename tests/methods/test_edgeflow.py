from __future__ import annotations

import pytest
import torch

import fakes
from fedglimpse.federation.state import Entry, Layout
from fedglimpse.methods.edgeflow import Everyone
from fedglimpse.simulation.client_reports import gradient_distance

A, B, C, D = range(4)


def chosen(name: str, distances: list[float], k: int, **keys: object) -> set[int]:
    selector = fakes.build("ha-edgeflow", **keys).selector
    assert selector.needs == {name}
    view = fakes.view(ids=range(len(distances)), reports={name: torch.tensor(distances)})
    return set(selector.select(view, k).slots.tolist())


@pytest.mark.parametrize(
    ("global_l2", "expected", "nearest"),
    [(False, [1, 5, 2.5, 3.0], {A, C}), (True, [1, 5, 2.5, 2.1213], {A, D})],
)
def test_the_worked_example(global_l2: bool, expected: list[float], nearest: set[int]) -> None:
    layout = Layout((Entry("a", (2,), 0, 2), Entry("b", (1,), 2, 3)), num_params=3, size=3)
    proxy = torch.tensor([1.0, 0, 2])
    gradients = torch.tensor([[1.0, 1, 2], [4, 4, 2], [1, 0, 4.5], [1.9, 1.2, 3.5]])
    distances = [
        float(gradient_distance(layout, g, proxy, per_tensor=not global_l2)) for g in gradients
    ]
    assert distances == pytest.approx(expected, abs=1e-4)
    name = "gradient_distance_l2" if global_l2 else "gradient_distance"
    assert chosen(name, distances, 2, options__global_l2=global_l2) == nearest


def test_a_client_with_the_proxy_gradient_is_always_kept() -> None:
    for seed in range(20):
        distances = torch.rand(6, generator=torch.Generator().manual_seed(seed)) + 0.01
        distances[seed % 6] = 0
        assert seed % 6 in chosen("gradient_distance", distances.tolist(), 1)


def test_the_divisor_of_the_authors_code() -> None:
    distances = [1.0, 5.0, 2.5, 3.0, 4.0]
    assert chosen("gradient_distance", distances, 1, options__divisor=1) == set(range(5))
    assert chosen("gradient_distance", distances, 1, options__divisor=2) == {A, C}
    assert chosen("gradient_distance", distances, 5, options__divisor=9) == {A}
    method = fakes.build("ha-edgeflow", options__divisor=2)
    assert method.budget(1, visible=5) == 5


def test_weights_are_sizes_unless_told_otherwise() -> None:
    view = fakes.view(ids=range(4), reports={"gradient_distance": torch.rand(4)})
    assert fakes.build("ha-edgeflow").selector.select(view, 2).weights is None
    even = fakes.build("ha-edgeflow", options__weights="uniform").selector.select(view, 2)
    assert even.weights is not None
    assert even.weights.tolist() == [0.5, 0.5]


def test_edgeflow_takes_every_visible_client() -> None:
    method = fakes.build("edgeflow", selection__k=2)
    view = fakes.view(ids=range(5))
    choice = method.selector.select(view, method.budget(2, view.num_visible))
    assert choice.slots.tolist() == [0, 1, 2, 3, 4]
    assert choice.weights is None
    even = Everyone("uniform").select(view, 5).weights
    assert even is not None
    assert even.tolist() == [0.2] * 5
