"""Aggregation and costs: pure arithmetic, checked by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedglimpse.errors import UserError
from fedglimpse.federation import models as nets
from fedglimpse.federation.aggregation import Source, TemporalWindow, WeightedDelta
from fedglimpse.federation.costs import CostModel, ModelFlops, RoundCost
from fedglimpse.federation.reports import Sizes
from fedglimpse.methods.base import UniformRandom
from fedglimpse.types import Method, Update


def update(state: Tensor, trained: Tensor, weights: list[float], num_params: int) -> Update:
    count = len(trained)
    return Update(
        round_num=0,
        ids=torch.arange(count),
        sizes=torch.ones(count).long(),
        starts=state.expand(count, -1),
        deltas=trained - state,
        weights=torch.tensor(weights),
        num_params=num_params,
        reports={},
    )


@pytest.mark.parametrize(
    ("window", "source", "wanted"),
    [
        (2, "smoothed", [0.5, 1.25, 2.125]),
        (3, "raw", [1.0, 1.5, 2.0]),
        (2, "raw", [1.0, 1.5, 2.5]),
        (1, "raw", [1.0, 2.0, 3.0]),
        (1, "smoothed", [1.0, 2.0, 3.0]),
    ],
)
def test_temporal_windows(window: int, source: Source, wanted: list[float]) -> None:
    aggregator, state = TemporalWindow(window, source), torch.zeros(1)
    found = []
    for raw in (1.0, 2.0, 3.0):
        saved = aggregator.state_dict()
        aggregator = TemporalWindow(window, source)  # every round as after a restart
        aggregator.load_state_dict(saved)
        state = aggregator.step(state, update(state, torch.tensor([[raw]]), [1.0], 1))
        found.append(float(state))
    assert found == pytest.approx(wanted)


def test_windows_that_make_no_sense() -> None:
    with pytest.raises(UserError, match="window=0"):
        TemporalWindow(0, "raw")
    with pytest.raises(UserError, match="source='row'"):
        TemporalWindow(2, "row")  # type: ignore[arg-type]


def test_fedavg_by_hand() -> None:
    state, trained = torch.zeros(1), torch.tensor([[2.0], [4.0]])
    by_size = update(state, trained, [0.25, 0.75], 1)
    assert float(WeightedDelta().step(state, by_size)) == pytest.approx(3.5)
    turned = update(state, trained.flip(0), [0.75, 0.25], 1)
    assert float(WeightedDelta().step(state, turned)) == pytest.approx(3.5)


@pytest.mark.parametrize("weights", [[5.0, 3.0, 0.1], [0.01, 0.02, 0.03], [0.0, 0.0, 0.0]])
def test_buffers_never_become_negative(weights: list[float]) -> None:
    """Importance weights do not sum to one; variances must stay between the clients'."""
    state = torch.tensor([1.0, 4.0])  # a parameter and a variance
    trained = torch.tensor([[2.0, 0.1], [3.0, 0.2], [0.0, 0.3]])
    found = WeightedDelta().step(state, update(state, trained, weights, 1))
    moved = sum(w * (t - 1) for w, t in zip(weights, [2.0, 3.0, 0.0], strict=True))
    assert float(found[0]) == pytest.approx(1 + moved)
    assert 0.1 - 1e-6 <= float(found[1]) <= 0.3 + 1e-6


def test_flops_of_the_har_model() -> None:
    """Two for each multiply-add; the backward pass has two products a layer, one in the first."""
    forward = 2 * (561 * 256 + 256 * 128 + 128 * 6)
    backward = 2 * forward - 2 * 561 * 256  # no gradient with respect to the input
    counted = ModelFlops.of(nets.har_mlp(), torch.randn(2, 561), 6)
    assert counted.forward == forward
    assert counted.train == forward + backward


ATTENTION = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Flatten(), nn.Linear(40, 10))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nets.cifar_cnn(), (3, 32, 32)),
        (nets.fashion_cnn("group"), (1, 28, 28)),
        (nets.digits_mlp(), (1, 8, 8)),
        (
            nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16), nn.Flatten(), nn.Linear(40, 10)),
            (5, 8),
        ),
    ],
    ids=["cifar", "fashion", "digits", "transformer"],
)
def test_flops_are_those_of_pytorchs_counter(model: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(2, *shape)
    with FlopCounterMode(display=False) as forward:
        logits = model(x)
    with FlopCounterMode(display=False) as backward:
        F.cross_entropy(logits, torch.zeros(2, dtype=torch.long)).backward()
    counted = ModelFlops.of(model, x, 10)
    assert 2 * counted.forward == forward.get_total_flops()
    assert 2 * (counted.train - counted.forward) == backward.get_total_flops()


def test_counting_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    ModelFlops.of(model, torch.ones(2, 3), 4)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_costs_by_hand() -> None:
    """d = 10, D = 3, P = 5, C = 2; 4 visible with 40 examples, 2 chosen with 15; 3 epochs."""
    costs = CostModel(ModelFlops(forward=7, train=20), Sizes(10, 3, 5, 2), epochs=3)
    examples = {0: 7, 1: 8, 2: 12, 3: 13}
    selector = UniformRandom()
    selector.needs = frozenset({"gradient_distance"})
    selector.learns_from = frozenset({"rms_loss"})
    method = Method(selector, WeightedDelta())
    pre = costs.round(method, examples, [0, 1], [0, 1], has_choice=True, selector_flops=99)
    assert pre.uplink_bytes == 4 * (2 * 10 + 4 + 2)
    assert pre.downlink_bytes == 4 * (4 * 10 + 4 * 10)  # the model and the proxy gradient
    assert pre.client_flops == 15 * 3 * 20 + 40 * 3 * 7
    assert pre.server_flops == 2 * 2 * 10 + 5 * 3 * 7 + 99
    selector.needs = frozenset({"sketch", "delta_similarity"})
    selector.learns_from = frozenset()
    post = costs.round(method, examples, [0, 1, 2, 3], [0, 1], has_choice=True)
    assert post.uplink_bytes == 4 * (4 * 10 + 4 * 3)  # similarity needs every whole update
    assert post.downlink_bytes == 4 * 4 * 10
    assert post.client_flops == 40 * 3 * 20
    assert post.server_flops == 2 * 2 * 10
    nothing = costs.round(method, examples, [], [], has_choice=False)
    assert nothing == RoundCost(0, 0, 0, 0)
