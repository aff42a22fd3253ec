"""What is said of an agent, on records whose answer is known."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from fedglimpse.studies.sweep.plan import read_plan
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep
from played import ROOT
from reproduction.diagnosis import diagnosis

spec = importlib.util.spec_from_file_location(
    "agent_diagnosis", ROOT / "plans" / "agent_diagnosis.py"
)
assert spec is not None
assert spec.loader is not None
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)


def records(kind: str, rounds: int = 300) -> list[dict[str, Any]]:
    """Rounds of 12 clients, 6 of them visible, 3 chosen; every third round explores."""
    draw, reward, found = random.Random(0), 0.5, []
    for number in range(rounds):
        visible = draw.sample(range(12), 6)
        worth = {i: draw.random() for i in visible}
        if kind == "always the same":
            worth = {i: float(i) for i in visible}
        chosen = draw.sample(visible, 3)
        if kind == "Q is right":
            reward += sum(worth[i] for i in chosen) - sum(worth.values()) / 2
        else:
            reward += draw.random()
        q = [8 + 0.1 * worth[i] for i in visible]
        middle = sum(q) / 6
        found.append(
            {
                "round": number,
                "visible": visible,
                "selected": chosen,
                "reward": reward,
                "behaviour": "greedy" if number % 3 else "explore",
                "q": q,
                "mean_q": middle,
                "q_spread": math.sqrt(sum((v - middle) ** 2 for v in q) / 6),
                "td_loss": 0.02,
                "attention_entropy": math.log(6) / 2,
            }
        )
    return found


def test_a_preference_for_the_same_clients_is_persistent() -> None:
    same = program.diagnose(records("always the same"), 100, "mse", 5)
    noise = program.diagnose(records("noise"), 100, "mse", 5)
    assert same["persistence"] > 0.95
    assert abs(noise["persistence"]) < 0.6  # twelve clients are few
    assert abs(noise["agreement"]) < 0.4


def test_q_that_knows_what_comes_agrees_with_it() -> None:
    assert program.diagnose(records("Q is right"), 100, "mse", 5)["agreement"] > 0.8


def test_spread_is_measured_in_errors_and_attention_in_shares() -> None:
    played = records("noise")
    spread = sum(r["q_spread"] for r in played[100:]) / 200
    found = program.diagnose(played, 100, "mse", 5)
    assert found["spread / error"] == pytest.approx(spread / math.sqrt(0.02), abs=1e-3)
    assert found["attention"] == pytest.approx(0.5)
    halved = program.diagnose(played, 100, "smooth_l1", 5)
    assert halved["spread / error"] == pytest.approx(spread / math.sqrt(0.04), abs=1e-3)


def test_where_there_is_no_choice_nothing_is_said() -> None:
    played = [{**r, "selected": r["visible"], "q": [1.0] * 6} for r in records("noise")]
    found = program.diagnose(played, 100, "mse", 5)
    assert "agreement" not in found
    assert "persistence" not in found


def test_the_table_has_every_setting_and_all_runs_together(tmp_path: Path) -> None:
    assert diagnosis(tmp_path) == "Not run yet."
    run = {"spread / error": 1.0, "spread / level": 0.01, "attention": 1.0, "agreement": -0.125}
    results = {"a": {"0": run, "1": {**run, "agreement": 0.125}}, "b": {"0": run}}
    (tmp_path / "x.json").write_text(json.dumps({"what": "python it", "results": results}))
    text = diagnosis(tmp_path)
    assert "    python it" in text
    assert "| a | 1.00 ± 0.00 (2) | 0.010 ± 0.000 (2) | 1.000 ± 0.000 (2) | – | 0.00" in text
    assert "| b | 1.00 (1) |" in text
    assert "−0.12 (1) |" in text
    assert "| all runs |" in text


PLAN = """
title = "Small"
claim = "it runs"
methods = ["glimpse"]
[base]
seeds = [0]
rounds = 12
data.name = "digits"
agent.learn_start = 2
agent.n_step = 1
[[settings]]
name = "digits, mobile"
"""


def test_the_program_reads_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.toml").write_text(PLAN)
    run_sweep(read_plan(tmp_path / "small.toml"), tmp_path / "runs", SweepOptions(quiet=True))
    words = [str(tmp_path / "runs"), "--name", "n", "--after", "5", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["x", *words])
    program.main()
    stored = json.loads((tmp_path / "n.json").read_text())
    assert stored["results"]["digits, mobile"]["0"]["spread / error"] > 0
    assert 0 < stored["results"]["digits, mobile"]["0"]["attention"] <= 1.001


def test_a_stored_study_has_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", str(ROOT / "results" / "agent_study"), "--name", "n"])
    with pytest.raises(SystemExit, match="has no records"):
        program.main()
