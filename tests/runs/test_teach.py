"""Pretraining on many federations: what is refused, what is held out, what can be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedglimpse import run
from fedglimpse.agent.policy import write_policy
from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.methods.glimpse import GlimpseSelector
from fedglimpse.runs.build import build_world
from fedglimpse.runs.pretrain import Taught, exploring, held_out, teach
from fedglimpse.runs.rounds import run_round
from mistakes import mistake

SMALL: dict[str, Any] = {
    "method": "glimpse", "data.name": "synthetic", "data.clients": 12,
    "visibility.cluster_size": 6, "selection.k": 2, "rounds": 14, "seeds": [0, 1, 2],
    "local.epochs": 1, "sketch.size": 16, "agent.d_token": 8,
}  # fmt: skip


def configs(**changes: Any) -> list[Config]:
    return [resolve({**SMALL, **changes})]


@pytest.fixture(scope="module")
def taught() -> Taught:
    larger = {**SMALL, "selection.k": 3, "visibility.cluster_size": 4}
    return teach([*configs(), resolve({**larger, "seeds": [3, 4, 5, 6, 7, 8]})], lessons=12)


def test_one_of_eight_is_held_out(taught: Taught) -> None:
    assert (taught.runs, taught.rounds, taught.held_out) == (8, 8 * 14, 1)
    assert held_out([5, 6, 5, 6]) == {6}  # all federations of a seed, or none
    assert held_out([*range(17), *range(17)]) == {7, 15}
    assert held_out([3, 3]) == set()
    assert taught.agreement is not None
    assert -1 <= taught.agreement.mean <= 1


def test_the_policy_is_used_as_it_is(taught: Taught, tmp_path: Path) -> None:
    file = write_policy(taught.policy, str(tmp_path / "policy.pt"))
    keys = {**SMALL, "seeds": [9], "agent.load": str(file), "agent.frozen": True}
    records = run(keys).records
    assert {record["behaviour"] for record in records} == {"greedy"}
    repeated = run(keys).records
    assert [r["selected"] for r in records] == [r["selected"] for r in repeated]
    assert records[0]["q"] != run({**SMALL, "seeds": [9]}).records[0]["q"]


def test_pretraining_is_deterministic(taught: Taught) -> None:
    one, other = (teach(configs(), lessons=5).policy["network"] for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], taught.policy["network"][name]) for name in one)


def test_exploring_runs_select_at_random_and_forget_nothing() -> None:
    plain = configs()[0]
    config = exploring(plain)
    assert replace(config, agent=plain.agent) == plain
    world = build_world(config)
    records = [record for _ in range(14) for record in run_round(world, False)]
    assert {record["behaviour"] for record in records} == {"explore"}
    selector = world.lanes[0].method.selector
    assert isinstance(selector, GlimpseSelector)
    memory = selector.agents.memory
    lane = selector.lane
    assert (memory.count[lane], memory.oldest[lane]) == (14, 0)
    highest = memory.rows["clients"][lane, :14, :6, 2].argmax(1)  # by loss
    taken = memory.rows["chosen"][lane, torch.arange(14), highest].float().mean()
    assert taken < 0.8  # at random 1 / 3; with the lean 1


def test_a_single_run_is_enough() -> None:
    result = teach(configs(seeds=[0]), lessons=2)
    assert (result.runs, result.held_out, result.agreement) == (1, 0, None)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"method": "fedavg"}, "method"),
        ({"agent.identity": "table"}, "agent.identity"),
        ({"agent.load": "p.pt"}, "agent.load"),
        ({"agent.save": "p.pt"}, "agent.save"),
        ({"agent.frozen": True}, "agent.frozen"),
        ({"agent.aux_weight": 0.1}, "agent.aux_weight"),
        ({"local.lr": 1e30}, "local.lr"),
        ({"agent.lr": 1e12, "agent.grad_clip": 0.0}, "agent.lr"),
        ({"agent.exploration": "partial"}, "agent.exploration"),
        ({"rounds": 1}, "rounds"),
    ],
)
def test_settings_that_allow_no_pretraining(changes: dict[str, Any], key: str) -> None:
    with mistake(key):
        teach(configs(**changes), lessons=20)


@pytest.mark.parametrize("key", ["agent.gamma", "rounds", "local.epochs"])
def test_federations_that_cannot_be_pretrained_on_together(key: str) -> None:
    changes = {"agent.gamma": 0.6, "rounds": 13, "local.epochs": 2}
    with mistake(key):
        teach([*configs(), *configs(**{key: changes[key]})], lessons=2)


def test_useless_requests() -> None:
    with mistake("--also"):
        teach([*configs(), *configs()], lessons=2)
    with mistake("--lessons"):
        teach(configs(), lessons=0)
