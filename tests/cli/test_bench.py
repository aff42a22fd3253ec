"""Measuring a machine: parts of a round, files, mistakes; and a run's trace."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from fedglimpse.agent.config import PRESETS
from fedglimpse.cli import bench
from fedglimpse.cli.main import app
from fedglimpse.errors import UserError
from fedglimpse.runs.experiment import run
from fedglimpse.runs.progress import TRACE, Profiled, Silent

ROOT = Path(__file__).parents[2]


def call(*words: str) -> Result:
    result = CliRunner().invoke(app, ["bench", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_time_inside_a_part_is_not_counted_for_the_part_around_it() -> None:
    stopwatch = bench.Stopwatch(torch.device("cpu"))
    times = iter([10.0, 12.0, 17.0, 18.0])  # outer begins, inner begins, inner ends, outer ends
    stopwatch.now = lambda: next(times)  # type: ignore[method-assign]
    with stopwatch.phase("outer"), stopwatch.phase("inner"):
        pass
    assert stopwatch.spent == {"inner": 5.0, "outer": 3.0}


def test_a_round_is_taken_apart(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    words = ("--dataset", "digits", "--lanes", "2", "--rounds", "2")
    told = call("round", *words, "--out", str(out))
    found = json.loads(out.read_text())
    (result,) = found["results"]
    assert found["commit"]
    assert found["device"]
    assert (result["lanes"], result["dataset"]) == (2, "digits")
    assert result["ms_per_lane_round"] > 0
    assert set(result["share"]) == {*bench.PHASES, "other"}
    assert sum(result["share"].values()) == pytest.approx(1, abs=0.01)
    assert all(result["share"][phase] > 0 for phase in bench.PHASES)
    head = next(line for line in told.output.splitlines() if line.startswith("dataset"))
    for column in ("ms per lane round", "tflops in training", *bench.PHASES):
        assert column in head


@pytest.mark.parametrize("preset", PRESETS)
def test_the_benchmark_of_the_agent_knows_every_preset(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    agent = importlib.import_module("agent")
    monkeypatch.setattr(agent, "WARM_UP", 0)
    monkeypatch.setattr(agent, "ROUNDS", 2)
    assert agent.measure(preset)["round_ms"] > 0


def test_training_alone_by_a_given_trainer(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    words = ("--dataset", "har", "--lanes", "1", "--rounds", "1", "--trainer", "batched")
    call("engine", *words, "--out", str(out))
    (result,) = json.loads(out.read_text())["results"]
    assert result["trainer"] == "BatchedTrainer"
    assert result["ms_per_10_clients"] > 0
    assert result["tflops"] >= 0


def test_beside_the_plain_loop(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    words = ("--dataset", "digits", "--lanes", "2", "--rounds", "1", "--beside-serial")
    call("engine", *words, "--out", str(out))
    (result,) = json.loads(out.read_text())["results"]
    assert result["trainer"] == "BatchedTrainer"
    ratio = result["serial_ms_per_10_clients"] / result["ms_per_10_clients"]
    assert result["times_serial"] == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["round", "--dataset", "mnist"], "--dataset mnist is unknown"),
        (["round", "--lanes", "0"], "--lanes"),
        (["engine", "--trainer", "foo"], "engine.trainer='foo' is unknown"),
        (["engine", "--dataset", "digits", "--dataset", "mnist"], "--dataset mnist is unknown"),
        (["engine", "--precision", "bf16", "--device", "cpu"], "engine.precision=bf16 needs a GPU"),
    ],
)
def test_mistakes_are_said(words: list[str], part: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=part):
        CliRunner().invoke(
            app, ["bench", *words, "--out", str(tmp_path / "b")], catch_exceptions=False
        )
    assert not (tmp_path / "b").exists()


def test_a_trace_holds_the_recorded_rounds(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    told = Profiled(Silent(), tmp_path / "r", rounds=4)
    run(
        {"rounds": 4, "data.clients": 8, "visibility.cluster_size": 4, "selection.k": 2},
        listener=told,
    )
    events = json.loads((tmp_path / "r" / TRACE).read_text())["traceEvents"]
    assert any("ProfilerStep#2" in event.get("name", "") for event in events)
    with pytest.raises(UserError, match="rounds=2 is too short for --profile"):
        Profiled(Silent(), tmp_path, rounds=2)
