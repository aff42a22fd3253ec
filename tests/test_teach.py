"""A policy taught by many federations: what is refused, what is kept aside, what can be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedglimpse import run
from fedglimpse.config import Config
from fedglimpse.configure import resolve
from fedglimpse.errors import UserError
from fedglimpse.rl.policy import write_policy
from fedglimpse.teach import Taught, by_lot, teach

SMALL: dict[str, Any] = {
    "method": "glimpse", "preset": "taught", "data.name": "synthetic", "data.clients": 12,
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
    config = by_lot(configs(rounds=700)[0])
    assert config.agent.epsilon_min == 1.0
    assert config.agent.updates_per_round == 0
    assert config.agent.buffer == 700
    assert replace(config, agent=configs(rounds=700)[0].agent) == configs(rounds=700)[0]


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
        ({"agent.frozen": True}, "agent.frozen=true learns nothing"),
        ({"agent.exploration": "partial"}, "agent.exploration=partial draws only a part"),
        ({"rounds": 1}, "1 rounds leave nothing to learn from"),
    ],
)
def test_what_cannot_be_taught(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        teach(configs(**changes), lessons=2)


def test_federations_that_do_not_fit_together() -> None:
    with pytest.raises(UserError, match=r"agree on agent\.\*"):
        teach([*configs(), *configs(**{"agent.gamma": 0.6})], lessons=2)
    with pytest.raises(UserError, match=r"rounds=14 and rounds=13"):
        teach([*configs(), *configs(rounds=13)], lessons=2)
    with pytest.raises(UserError, match=r"local\.epochs.*cannot share a world"):
        teach([*configs(), *configs(**{"local.epochs": 2})], lessons=2)
    with pytest.raises(UserError, match="0 lessons"):
        teach(configs(), lessons=0)
