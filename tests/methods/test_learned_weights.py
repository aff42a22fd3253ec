"""FedDRL and FedPPO: weights set after training by one actor-critic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import fakes
from fedglimpse.methods.feddrl import not_outlying
from fedglimpse.methods.learners.learned_weights import RewardedRandom, WeightAgent, loss_reward
from fedglimpse.runs.experiment import run
from fedglimpse.types import Method, Update

both_methods = pytest.mark.parametrize("name", ["feddrl", "fedppo"])


def agent_of(method: Method) -> WeightAgent:
    return cast(RewardedRandom, method.selector).agent


def trained(
    t: int = 0, ids: tuple[int, ...] = (2, 5, 8), before: Any = None, after: Any = None
) -> Update:
    """An update whose aggregate is the vector of weights."""
    count = len(ids)
    before = torch.tensor(before) if before else fakes.report("loss", torch.tensor(ids), t)
    after = torch.tensor(after) if after else fakes.report("loss_after", torch.tensor(ids), t)
    return fakes.update(
        torch.eye(count),
        ids=ids,
        sizes=fakes.SIZES[list(ids)].tolist(),
        round_num=t,
        reports={"loss": before, "loss_after": after},
    )


def weights_of(method: Method, update: Update) -> Tensor:
    return method.aggregator.step(torch.zeros(len(update.ids)), update)


def test_reward_of_the_worked_example() -> None:
    assert loss_reward(torch.tensor([1.0, 2.0, 3.0])) == -4.0


@both_methods
def test_equal_logits_give_equal_weights(name: str) -> None:
    method = fakes.build(name, options__filter=0.0) if name == "feddrl" else fakes.build(name)
    agent_of(method).ppo.act = lambda clients, ids, t: torch.full((len(ids),), 0.7)  # type: ignore[method-assign]
    assert weights_of(method, trained()).tolist() == pytest.approx([1 / 3] * 3)


@both_methods
def test_weights_are_a_softmax_of_the_sample(name: str) -> None:
    method = fakes.build(name)
    update = trained(before=[1.0, 2.0, 3.0], after=[0.5, 0.5, 0.6])
    weights = weights_of(method, update)
    assert weights.sum().item() == pytest.approx(1.0)
    assert (weights > 0).all()
    (step,) = agent_of(method).ppo.steps
    assert torch.allclose(weights, step.action.softmax(0), atol=1e-6)
    expected = [[1.0, 0.5, 30 / 90, 0.0], [2.0, 0.5, 15 / 90, 0.0], [3.0, 0.6, 45 / 90, 0.0]]
    assert torch.allclose(step.clients, torch.tensor(expected))


@both_methods
@pytest.mark.parametrize("order", [[1, 0, 3, 2], [3, 2, 1, 0]])
def test_permutation_equivariance(name: str, order: list[int]) -> None:
    ids = (2, 5, 8, 9)
    update = trained(3, ids)
    moved = Update(
        **{
            **vars(update),
            "ids": update.ids[order],
            "sizes": update.sizes[order],
            "reports": {k: v[order] for k, v in update.reports.items()},
        }
    )
    straight = weights_of(fakes.build(name), update)
    turned = weights_of(fakes.build(name), moved)
    assert torch.allclose(turned, straight[order], atol=1e-6)


def test_age_counts_the_rounds_away() -> None:
    method = fakes.build("fedppo")
    weights_of(method, trained(0, (2, 5)))
    weights_of(method, trained(1, (2, 8)))
    weights_of(method, trained(4, (2, 5, 9)))
    clients = agent_of(method).ppo.steps[-1].clients
    assert clients[:, 3].tolist() == pytest.approx(torch.tensor([2.0, 3, 4]).log1p().tolist())


def feed(method: Method, t: int, score: float) -> Any:
    view = fakes.view(method.selector, [2, 5, 8], t)
    outcome = fakes.outcome(method.selector, view, method.selector.select(view, 3))
    return method.selector.feedback(replace(outcome, score=score))


def test_fedppo_is_rewarded_by_the_score() -> None:
    method = fakes.build("fedppo")
    weights_of(method, trained(0))
    metrics = feed(method, 0, 0.7)
    assert metrics["agent_reward"] == 0.7
    assert agent_of(method).ppo.steps[0].reward == 0.7
    assert method.selector.needs == {"reward"}


def test_feddrl_is_rewarded_by_the_losses_of_the_next_round() -> None:
    method = fakes.build("feddrl")
    weights_of(method, trained(0))
    assert "agent_reward" not in feed(method, 0, 0.7)
    assert agent_of(method).ppo.steps[0].reward is None
    weights_of(method, trained(1, before=[1.0, 2.0, 3.0]))
    assert agent_of(method).ppo.steps[0].reward == -4.0
    assert feed(method, 1, 0.7)["agent_reward"] == -4.0
    assert method.selector.needs == frozenset()


def test_a_reward_that_is_no_number_is_not_learnt_from() -> None:
    method = fakes.build("feddrl")
    weights_of(method, trained(0))
    weights = weights_of(method, trained(1, before=[1.0, float("inf"), 3.0]))
    assert weights.isfinite().all()
    assert len(agent_of(method).ppo.steps) == 1  # the first has been forgotten


def test_one_agent_serves_both_and_learns() -> None:
    method = fakes.build("fedppo", options__horizon=3)
    weights = agent_of(method).ppo.net.actor[0].weight.detach().clone()
    seen = []
    for t in range(4):
        weights_of(method, trained(t))
        seen.append(feed(method, t, 0.1 * t))
    assert ["ppo_loss" in metrics for metrics in seen] == [False, False, False, True]
    assert seen[3]["server_flops"] > seen[2]["server_flops"] > 0
    assert not torch.equal(agent_of(method).ppo.net.actor[0].weight, weights)


def test_robust_filter() -> None:
    losses = torch.tensor([0.5, 0.6, 0.55, 0.52, 9.0])
    assert not_outlying(losses, 3.5).tolist() == [True, True, True, True, False]
    assert not_outlying(-losses, 3.5).all()  # a low loss is never suspicious
    assert not_outlying(torch.tensor([0.5, 0.5, 0.5, 0.7]), 3.5).all()  # no measure of spread
    assert not_outlying(torch.tensor([0.5, 9.0]), 3.5).all()
    assert not_outlying(torch.tensor([4.0]), 3.5).all()
    broken = torch.tensor([0.5, float("nan"), 0.6])
    assert not_outlying(broken, 3.5).tolist() == [True, False, True]
    assert not_outlying(torch.full((2,), float("nan")), 3.5).all()


def test_feddrl_gives_untrusted_models_no_weight() -> None:
    ids = (1, 2, 5, 8, 9)
    after = [0.5, 0.6, 9.0, 0.55, 0.52]
    method = fakes.build("feddrl")
    weights = weights_of(method, trained(0, ids, after=after))
    assert weights[2] == 0
    assert weights.sum().item() == pytest.approx(1.0)
    assert feed(method, 0, 0.5)["filtered"] == 1.0
    assert (weights_of(fakes.build("fedppo"), trained(0, ids, after=after)) > 0).all()
    assert (weights_of(fakes.build("feddrl", options__filter=0.0), trained(0, ids)) > 0).all()


@both_methods
def test_two_floats_more_than_fedavg(name: str) -> None:
    keys = {"data.clients": 12, "visibility.cluster_size": 5, "selection.k": 2, "rounds": 1}
    records = run({"method": name, **keys}).records
    fedavg = run({"method": "fedavg", **keys}).records
    assert records[0]["uplink_bytes"] - fedavg[0]["uplink_bytes"] == 2 * 2 * 4
    assert records[0]["downlink_bytes"] == fedavg[0]["downlink_bytes"]
