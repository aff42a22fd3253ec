"""Policies that travel from run to run, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedglimpse import run
from fedglimpse.agent.policy import read_policy
from mistakes import mistake_naming

AGENT = {
    "method": "glimpse", "rounds": 3, "agent.learn_start": 1, "agent.n_step": 1,
    "agent.updates_per_round": 1,
}  # fmt: skip


def test_a_policy_stores_its_sketch_settings(tmp_path: Path) -> None:
    file = str(tmp_path / "policy.pt")
    run({**AGENT, "agent.save": file})
    run({**AGENT, "agent.load": file})
    for key, value in (("size", 64), ("kind", "count"), ("parameters", "all"), ("scale", "mean")):
        with mistake_naming(f"sketch.{key}="):
            run({**AGENT, "agent.load": file, f"sketch.{key}": value})
    older = {key: value for key, value in read_policy(file).items() if key != "sketch"}
    torch.save(older, file)  # written before policies said so
    run({**AGENT, "agent.load": file, "sketch.kind": "count"})


@pytest.mark.parametrize("method", ["fedavg", "favor"])
@pytest.mark.parametrize("key", ["save", "load"])
def test_only_methods_with_a_policy_accept_one(method: str, key: str, tmp_path: Path) -> None:
    with mistake_naming(f"method={method}"):
        run({"method": method, "rounds": 1, f"agent.{key}": str(tmp_path / "p.pt")})


def test_policies_of_several_seeds_have_a_file_each(tmp_path: Path) -> None:
    file = str(tmp_path / "policy.pt")
    run({**AGENT, "seeds": [0, 1], "agent.save": file})
    with mistake_naming(str(tmp_path / "policy-0.pt")):
        run({**AGENT, "agent.load": file})
    run({**AGENT, "agent.load": str(tmp_path / "policy-1.pt")})
