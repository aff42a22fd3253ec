"""FedABC and FedACS: fixed attention over clients."""

from __future__ import annotations

import math

import pytest
import torch

import fakes
from fedglimpse.methods.fedabc import attention
from fedglimpse.types import Choice


def abc(predictions: torch.Tensor, round_num: int, k: int, **keys: object) -> Choice:
    selector = fakes.build("fedabc", rounds=10, **keys).selector
    reports = {"proxy_predictions": predictions.flatten(1)}
    ids = range(len(predictions))
    return selector.select(fakes.view(ids=ids, reports=reports, round_num=round_num), k)


def test_equal_predictions_are_equally_eligible() -> None:
    same = torch.rand(1, fakes.P, fakes.C).softmax(2).expand(5, -1, -1)
    assert attention(same).tolist() == pytest.approx([0.2] * 5)
    choice = abc(same, 0, k=3)
    assert choice.info == {"eligible": 5}
    assert len(choice.slots) == 3


def test_agreement_scores_higher_and_the_bar_falls() -> None:
    one = torch.tensor([[[0.9, 0.05, 0.05]]]).expand(4, fakes.P, 3)
    odd = torch.tensor([[[0.001, 0.001, 0.998]]]).expand(1, fakes.P, 3)
    mixed = torch.cat([one, odd])
    scores = attention(mixed)
    assert scores[4] < scores[:4].min()
    assert abc(mixed, 0, 5).slots.sort().values.tolist() == [0, 1, 2, 3]
    assert len(abc(mixed, 10, 5).slots) == 5  # the bar is 0 in round T
    assert len(abc(mixed, 50, 5).slots) == 5
    assert len(abc(mixed, 0, 5, options__threshold=0.0).slots) == 5


def test_a_client_is_compared_with_the_others_only() -> None:
    p = [0.5, 0.5]
    q = [0.9, 0.1]
    q_to_p = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)  # KL(q || p)
    p_to_q = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    scores = attention(torch.tensor([[p], [q]]))
    expected = math.exp(-q_to_p) / (math.exp(-q_to_p) + math.exp(-p_to_q))
    assert scores[0].item() == pytest.approx(expected, abs=1e-6)


def test_a_single_client_is_its_own_best() -> None:
    assert attention(torch.rand(1, 4, 3)).tolist() == [1.0]


def test_certain_predictions_stay_finite() -> None:
    sure = torch.eye(3)[:, None].expand(3, 4, 3)  # three clients, each sure of another class
    assert attention(sure).isfinite().all()


def acs(deltas: torch.Tensor, k: int, **keys: object) -> dict[int, float]:
    unit = torch.nn.functional.normalize(deltas, dim=1)
    view = fakes.view(ids=range(len(deltas)), reports={"delta_similarity": unit @ unit.T})
    choice = fakes.build("fedacs", **keys).selector.select(view, k)
    assert choice.weights is not None
    assert choice.weights.sum().item() == pytest.approx(1)
    return dict(zip(choice.slots.tolist(), choice.weights.tolist(), strict=True))


def test_orthogonal_updates_get_equal_attention() -> None:
    assert acs(torch.eye(4), 4) == pytest.approx({0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25})


def test_an_opposite_update_lowers_a_clients_score() -> None:
    before = acs(torch.eye(3), 3)
    after = acs(torch.cat([torch.eye(3), -torch.eye(3)[:1]]), 4)
    assert after[0] / after[1] < before[0] / before[1] - 0.1
    assert set(acs(torch.cat([torch.eye(3), -torch.eye(3)[:1]]), 2)) == {1, 2}


def test_a_low_temperature_sharpens_attention() -> None:
    deltas = torch.tensor([[1.0, 0], [1, 0.2], [0, 1]])
    sharp, soft = (acs(deltas, 3, options__temperature=t) for t in (0.05, 1.0))
    assert sharp[2] < soft[2] < soft[1] < sharp[1]
