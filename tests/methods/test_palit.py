from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

import fakes
from fedglimpse.methods.palit import (
    DOWN,
    HOLD,
    UP,
    JudgedRandom,
    Trust,
    contribution,
    directions,
    new_belief,
    new_gain,
    new_trust,
    unusual,
)
from fedglimpse.types import Method


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def trust_of(method: Method) -> Trust:
    return cast(JudgedRandom, method.selector).trust


def test_worked_example() -> None:
    assert new_trust(one(1.0), one(0.5), one(0.0)).item() == pytest.approx(0.85)
    belief = new_belief(one(0.5), one(0.5), one(0.0))  # posterior .65
    assert belief.item() == pytest.approx(0.62)
    assert new_gain(one(1.0), belief, torch.tensor([DOWN])).item() == pytest.approx(0.69)


def test_actions_and_bounds() -> None:
    gain = torch.full((3,), 1.0).double()
    belief = torch.full((3,), 0.4).double()
    new = new_gain(gain, belief, torch.tensor([HOLD, DOWN, UP]))
    assert new.tolist() == pytest.approx([1.0, 0.8, 1.12])
    assert new_gain(one(2.0), one(0.1), torch.tensor([UP])).item() == 2.0
    assert new_gain(one(0.01), one(0.9), torch.tensor([DOWN])).item() == 0.01
    assert new_trust(one(1.0), one(0.0), one(1.0)).item() == 1.0
    assert new_trust(one(0.01), one(1.0), one(0.0)).item() == 0.01
    assert new_belief(one(0.99), one(1.0), one(0.0)).item() == 0.99
    assert new_belief(one(0.01), one(0.0), one(1.0)).item() == 0.01


def test_contribution() -> None:
    weights = torch.tensor([0.5, 0.001, 0.25]).double()
    assert contribution(0.2, weights).tolist() == pytest.approx([0.4, 1.0, 0.8])
    assert contribution(-3.0, weights).tolist() == [0.0, 0.0, 0.0]


def test_directions_are_those_of_updates() -> None:
    deltas = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, -4.0]])
    divergence, norms, change = directions(deltas, torch.tensor([0.0, 3.0]))
    total = torch.tensor([3.0, -4.0])
    assert divergence.tolist() == pytest.approx([1 - 3 / 5, 1 - 3 / 5, 1 - 4 / 5])
    assert norms.tolist() == [2.0, 1.0, 4.0]
    assert change.tolist() == pytest.approx([2 / 3, 1 / 3, 1.0])  # capped
    assert directions(torch.stack([total, -total]), total)[0].tolist() == [1.0, 1.0]  # sum is 0
    assert directions(torch.stack([3 * total, -total]), total)[0].tolist() == [0.0, 2.0]


def test_unusual_norms() -> None:
    nan = math.nan
    past = torch.tensor([[nan, nan, 1.0, 2.0, 3.0], [nan, nan, nan, nan, 2.0], [nan] * 5])
    spread = math.sqrt(2 / 3)
    seen = unusual(torch.tensor([3.0, 99.0, 99.0]).double(), past.double())
    assert seen.tolist() == pytest.approx([1 / spread / 3, 0.0, 0.0], abs=1e-5)
    assert unusual(one(50.0), past[:1].double()).item() == 1.0


def feed(method: Method, t: int, score: float) -> Any:
    view = fakes.view(method.selector, [2, 5, 8], t)
    outcome = fakes.outcome(method.selector, view, method.selector.select(view, 3))
    return method.selector.feedback(replace(outcome, score=score))


def test_weights_are_gain_times_trust() -> None:
    method = fakes.build("palit", options__epsilon_least=0.0, options__epsilon_decay=1e-9)
    trust = trust_of(method)
    trust.agent.count = 1  # no exploration
    trust.agent.act = lambda *_: torch.tensor([HOLD, DOWN, UP])  # type: ignore[method-assign]
    trust.trust[[2, 5, 8]] = torch.tensor([1.0, 0.5, 0.25]).double()
    trust.belief[[2, 5, 8]] = torch.tensor([0.5, 0.8, 0.5]).double()
    new = method.aggregator.step(torch.ones(3), fakes.update(torch.eye(3), ids=[2, 5, 8]))
    raw = torch.tensor([1.0, 0.5 * (1 - 0.4), 0.25 * 1.1])
    assert (new - 1).tolist() == pytest.approx((raw / raw.sum()).tolist())


def test_a_round_in_numbers() -> None:
    """Two rounds by hand: one client against two others."""
    method = fakes.build("palit")
    trust = trust_of(method)
    trust.agent.act = lambda *_: torch.tensor([HOLD, DOWN, HOLD])  # type: ignore[method-assign]
    deltas = torch.tensor([[3.0, 0.0], [-1.0, 0.0], [3.0, 0.0]])
    state = torch.tensor([0.0, 5.0])
    for t, score in enumerate((0.50, 0.5005)):
        update = fakes.update(deltas, ids=[2, 5, 8], round_num=t)
        method.aggregator.step(state, update)
        assert trust.weighed is not None
        assert trust.weighed.anomaly.tolist() == pytest.approx([0.2, 2.2 / 3, 0.2])
        weights = trust.weighed.weights
        metrics = feed(method, t, score)
    # the first round has nothing to compare with; the second gained .05 percentage points
    contributed = 0.05 / weights
    assert metrics["agent_reward"] == pytest.approx(0.05 - 0.5 / 3)
    assert metrics["acted"] == pytest.approx(1 / 3)
    expected = 1.0 * (1 - 0.3 * 2.2 / 3) * (1 - 0.3 * 2.2 / 3 + 0.2 * contributed[1].item())
    assert trust.trust[5].item() == pytest.approx(expected)
    assert trust.trust[2] > trust.trust[5]
    assert trust.belief[5] > trust.belief[2]
    assert trust.last[[2, 5, 8, 0]].tolist() == [1, 1, 1, -1]
    rows = trust.agent.rows
    assert rows["action"][:6].tolist() == [HOLD, DOWN, HOLD] * 2
    belief = new_belief(one(0.5), one(2.2 / 3), one(0.0)).item()
    after = [belief, 1 - 0.22, 0.75, 0.0, 2.2 / 3]
    second = [belief, 1 - 0.22, 0.75, 1.0, 2.2 / 3]
    assert rows["after"][1].tolist() == pytest.approx(after)
    assert rows["state"][4].tolist() == pytest.approx(second)


def test_features_tell_clients_apart() -> None:
    trust = trust_of(fakes.build("palit"))
    trust.belief[3] = 0.7
    trust.trust[3] = 0.6
    trust.gain[3] = 1.5
    trust.last[3] = 4
    rows = trust.features(torch.tensor([3, 4]), torch.tensor([0.2, 0.1]), 10)
    assert rows[0].tolist() == pytest.approx([0.7, 0.6, 1.5, 0.6, 0.2])
    assert rows[1].tolist() == pytest.approx([0.5, 1.0, 1.0, 1.1, 0.1])


def test_only_participants_change() -> None:
    method = fakes.build("palit")
    before = trust_of(method).state_dict()
    method.aggregator.step(torch.ones(3), fakes.update(torch.eye(3), ids=[2, 5, 8]))
    feed(method, 0, 0.5)
    absent = [i for i in range(fakes.N) if i not in (2, 5, 8)]
    for name in Trust.TABLES:
        after_round = getattr(trust_of(method), name)
        assert torch.equal(after_round[absent].nan_to_num(), before[name][absent].nan_to_num())


def test_a_poisoner_loses_its_weight() -> None:
    """Client 5 pulls against the others in every round."""
    method = fakes.build("palit", options__epsilon_decay=50.0)
    state = torch.ones(4)
    for t in range(60):
        draw = torch.Generator().manual_seed(t)
        deltas = torch.ones(3, 4) + 0.3 * torch.randn(3, 4, generator=draw)
        deltas[1] *= -0.8
        method.aggregator.step(state, fakes.update(deltas, ids=[2, 5, 8], round_num=t))
        assert trust_of(method).weighed is not None
        weights = trust_of(method).weighed.weights  # type: ignore[union-attr]
        feed(method, t, 0.5 + 0.01 * (t % 2))
    assert weights[1] < 0.05
