"""Visibility patterns that are registered by name, or are a user's own code."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedglimpse.cli.main import app
from fedglimpse.federation.visibility import PATTERNS, Pattern
from fedglimpse.runs.experiment import run
from mistakes import mistake

SMALL: dict[str, Any] = {"data.clients": 12, "selection.k": 2, "local.epochs": 1, "rounds": 3}

PLUGIN = '''
import torch


class Alternate:
    """Even clients in even rounds, odd clients in odd ones."""

    def __init__(self, num_clients, settings):
        self.num_clients = num_clients

    def visible(self, seed, round_num):
        return range(round_num % 2, self.num_clients, 2)


class Drawn:
    """A few clients, drawn from torch's global generator."""

    def __init__(self, num_clients, settings):
        self.num_clients, self.size = num_clients, settings.cluster_size

    def visible(self, seed, round_num):
        return torch.randperm(self.num_clients)[: self.size].sort().values
'''


@dataclass(frozen=True)
class FirstHalf:
    num_clients: int
    cluster_size: int

    def visible(self, seed: int, round_num: int) -> torch.Tensor:
        return torch.arange(self.cluster_size)


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in with the module `own_visibility`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_visibility", raising=False)
    file = tmp_path / "own_visibility.py"
    file.write_text(PLUGIN)
    return file


def test_a_class_and_its_meaning_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = Pattern(FirstHalf, "the first clients", settings=("cluster_size",))
    monkeypatch.setitem(PATTERNS, "first-half", pattern)
    settings = {**SMALL, "visibility.kind": "first-half", "visibility.cluster_size": 6}
    for record in run(settings).records:
        assert record["visible"] == [0, 1, 2, 3, 4, 5]
    with mistake("visibility.trace"):
        run({**settings, "visibility.trace": "x.csv"})


def test_a_plugin_is_run_from_the_command_line_and_a_change_noticed(plugin: Path) -> None:
    settings = [f"{key}={value}" for key, value in SMALL.items()]
    command = ["run", "visibility.kind=own_visibility:Alternate", *settings, "--out", "out"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    lines = Path("out/rounds.jsonl").read_text().splitlines()
    visible = [json.loads(line)["visible"] for line in lines]
    assert visible == [list(range(t % 2, 12, 2)) for t in range(3)]
    resume = ["run", "--out", "out", "--resume"]
    assert CliRunner().invoke(app, resume).exit_code == 0
    environment = json.loads(Path("out/environment.json").read_text())
    assert list(environment["own_code"]) == ["own_visibility"]
    plugin.write_text(PLUGIN + "\n# another file\n")
    sys.modules.pop("own_visibility")
    with mistake("--out"):
        run({**SMALL, "visibility.kind": "own_visibility:Alternate"}, Path("out"), resume=True)


def test_lanes_and_single_runs_see_the_same(plugin: Path) -> None:
    settings = {**SMALL, "visibility.kind": "own_visibility:Drawn", "visibility.cluster_size": 5}
    lanes = run({**settings, "seeds": [0, 1]}).records
    alone = run({**settings, "seeds": [1]}).records
    assert [r["visible"] for r in lanes if r["seed"] == 1] == [r["visible"] for r in alone]
    assert len({tuple(record["visible"]) for record in lanes}) > 3
