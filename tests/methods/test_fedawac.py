from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fakes
from fedglimpse.federation.aggregation import weighted_delta
from fedglimpse.methods.fedawac import ConsistencyWindow, Options, consistency_weights, variances

V = torch.tensor([0.5, 1.0, 2.0])
SIZES = torch.tensor([100, 100, 200])


def test_population_variance_over_classes() -> None:
    logits = torch.tensor([[[1.0, -1, 0], [2, 0, -2]]])  # one client, two examples
    assert variances(logits, "class_var").item() == pytest.approx(1.6667, abs=1e-4)
    assert variances(logits[:, :1], "class_var").item() == pytest.approx(0.6667, abs=1e-4)


def test_deviation_from_the_ensemble() -> None:
    logits = torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]], [[4.0, 0.0]]])  # mean logits [2, 0]
    assert variances(logits, "ensemble_dev").tolist() == [2.0, 0.0, 2.0]


def test_maps_from_variance_to_weight() -> None:
    def weights(kind: str, sizes: Tensor = SIZES) -> list[float]:
        return consistency_weights(V, sizes, Options(map=kind)).tolist()

    assert weights("inverse") == pytest.approx([0.5, 0.25, 0.25])
    ones = torch.ones(3)
    assert weights("softmax", ones) == pytest.approx([0.5465, 0.3315, 0.1220], abs=1e-4)
    assert weights("softmax", ones) == pytest.approx(weights("softmax", 7 * ones))
    assert weights("proportional") == pytest.approx([50 / 550, 100 / 550, 400 / 550])


@pytest.mark.parametrize("v", [[0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
def test_a_constant_model_does_not_take_all_weight(v: list[float]) -> None:
    sizes = torch.full((len(v),), 10)
    for kind in ("inverse", "softmax", "proportional"):
        weights = consistency_weights(torch.tensor(v), sizes, Options(map=kind))
        assert weights.isfinite().all()
        assert weights.sum().item() == pytest.approx(1)
        assert weights.max() < 0.996


def aggregates(options: Options, values: list[float]) -> list[float]:
    """Return the global models when the raw aggregates are `values`."""
    window = ConsistencyWindow(options, num_classes=2)
    state = torch.zeros(1)
    seen = []
    for t, value in enumerate(values):
        update = fakes.update(
            torch.tensor([[value]]) - state,
            round_num=t,
            reports={"proxy_logits": torch.tensor([[1.0, 0.0]])},
        )
        state = window.step(state, update)
        seen.append(state.item())
    return seen


def test_the_window_averages_raw_aggregates() -> None:
    assert aggregates(Options(window=2), [1, 2, 3]) == pytest.approx([1, 1.5, 2.5])
    assert aggregates(Options(window=1), [1, 2, 3]) == pytest.approx([1, 2, 3])
    assert aggregates(Options(window=3), [1, 2, 6]) == pytest.approx([1, 1.5, 3])


def test_the_most_correlated_history_looks_further_back() -> None:
    seen = aggregates(Options(window=2, history="most_correlated"), [1.0, -2.0, 3.0])
    assert seen == pytest.approx([1, -0.5, 2])  # 3 points where 1 does, not where -2 does
    seen = aggregates(Options(window=2, history="most_correlated", store=1), [1.0, -2.0, 3.0])
    assert seen == pytest.approx([1, -0.5, 0.5])


def test_one_slot_and_equal_variances_are_fedavg() -> None:
    method = fakes.build("fedawac", options__window=1)
    state = torch.randn(fakes.STATE, generator=torch.Generator().manual_seed(0))
    logits = fakes.report("proxy_logits", torch.tensor([0]), 0).expand(4, -1)
    deltas = torch.randn(4, fakes.STATE, generator=torch.Generator().manual_seed(1))
    sizes = [10, 20, 30, 40]
    update = fakes.update(
        deltas, sizes=sizes, num_params=fakes.PARAMS, reports={"proxy_logits": logits}
    )
    by_size = fakes.update(deltas, weights=[0.1, 0.2, 0.3, 0.4], num_params=fakes.PARAMS)
    torch.testing.assert_close(
        method.aggregator.step(state, update), weighted_delta(state, by_size)
    )
