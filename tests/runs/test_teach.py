"""A policy taught by many federations: what is refused, what is kept aside, what can be used."""

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
from fedglimpse.errors import UserError
from fedglimpse.runs.build import build_world
from fedglimpse.runs.pretrain import Taught, by_lot, kept_aside, teach
from fedglimpse.runs.rounds import play_round

SMALL: dict[str, Any] = {
    "method": "glimpse", "data.name": "synthetic", "data.clients": 12,
    "visibility.cluster_size": 6, "selection.k": 2, "rounds": 14, "seeds": [0, 1, 2],
    "local.epochs": 1, "sketch.size": 16, "agent.d_token": 8,
}  # fmt: skip


def configs(**changes: Any) -> list[Config]:
    return [resolve({**SMALL, **changes})]


@pytest.fixture(scope="module")
def taught() -> Taught:
    more = {**SMALL, "selection.k": 3, "visibility.cluster_size": 4}
    return teach([*configs(), resolve({**more, "seeds": [3, 4, 5, 6, 7, 8]})], lessons=12)


def test_one_of_eight_is_kept_aside(taught: Taught) -> None:
    assert (taught.runs, taught.rounds, taught.aside) == (8, 8 * 14, 1)
    assert kept_aside([5, 6, 5, 6]) == {6}  # all federations of a seed, or none
    assert kept_aside([*range(17), *range(17)]) == {7, 15}
    assert kept_aside([3, 3]) == set()
    assert taught.agreement is not None
    assert -1 <= taught.agreement.mean <= 1


def test_the_policy_is_used_as_it_is(taught: Taught, tmp_path: Path) -> None:
    file = write_policy(taught.policy, str(tmp_path / "policy.pt"))
    keys = {**SMALL, "seeds": [9], "agent.load": str(file), "agent.frozen": True}
    records = run(keys).records
    assert {record["behaviour"] for record in records} == {"greedy"}
    again = run(keys).records
    assert [r["selected"] for r in records] == [r["selected"] for r in again]
    assert records[0]["q"] != run({**SMALL, "seeds": [9]}).records[0]["q"]


def test_teaching_again_is_the_same(taught: Taught) -> None:
    one, other = (teach(configs(), lessons=5).policy["network"] for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(torch.equal(one[name], taught.policy["network"][name]) for name in one)


def test_runs_that_teach_draw_all_and_forget_nothing() -> None:
    plain = configs(**{"agent.loss_lean": 5.0, "agent.prove": True})[0]
    config = by_lot(plain)
    assert replace(config, agent=plain.agent) == plain
    world = build_world(config)
    records = [record for _ in range(14) for record in play_round(world, False)]
    assert {record["behaviour"] for record in records} == {"explore"}
    agent = world.lanes[0].method.selector.agent  # type: ignore[attr-defined]
    assert (agent.replay.count, agent.replay.oldest) == (14, 0)
    highest = agent.replay.rows["clients"][:14, :6, 2].argmax(1)  # by loss
    taken = agent.replay.rows["chosen"][torch.arange(14), highest].float().mean()
    assert taken < 0.8  # by lot 1 / 3; with the lean 1


def test_a_single_run_teaches_too() -> None:
    found = teach(configs(seeds=[0]), lessons=2)
    assert (found.runs, found.aside, found.agreement) == (1, 0, None)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"method": "fedavg"}, "method=fedavg learns no policy"),
        ({"agent.identity": "table"}, "agent.identity=table remembers"),
        ({"agent.load": "p.pt"}, "agent.load has no place"),
        ({"agent.save": "p.pt"}, "agent.save has no place"),
        ({"agent.frozen": True}, "agent.frozen has no place"),
        ({"agent.aux_weight": 0.1}, "agent.aux_weight has no place"),
        ({"local.lr": 1e30}, "In no round an update was used"),
        ({"agent.lr": 1e12, "agent.grad_clip": 0.0}, "The lessons diverged"),
        ({"agent.exploration": "partial"}, "agent.exploration=partial draws only a part"),
        ({"rounds": 1}, "1 rounds leave nothing to learn from"),
    ],
)
def test_what_cannot_be_taught(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        teach(configs(**changes), lessons=20)


def test_federations_that_do_not_fit_together() -> None:
    with pytest.raises(UserError, match=r"agent\.gamma, which is 0\.5 and 0\.6"):
        teach([*configs(), *configs(**{"agent.gamma": 0.6})], lessons=2)
    with pytest.raises(UserError, match=r"rounds=14 and rounds=13"):
        teach([*configs(), *configs(rounds=13)], lessons=2)
    with pytest.raises(UserError, match=r"local\.epochs.*cannot share a world"):
        teach([*configs(), *configs(**{"local.epochs": 2})], lessons=2)
    with pytest.raises(UserError, match="the same in every setting"):
        teach([*configs(), *configs()], lessons=2)
    with pytest.raises(UserError, match="0 lessons"):
        teach(configs(), lessons=0)
