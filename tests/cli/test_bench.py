"""Measuring a machine: phases of a round, files, mistakes; and a run's trace."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from fedglimpse.agent.config import PRESETS
from fedglimpse.cli import timing
from fedglimpse.cli.main import app
from fedglimpse.runs.experiment import run
from fedglimpse.runs.progress import TRACE, Profiled, Silent
from mistakes import mistake, mistake_naming

ROOT = Path(__file__).parents[2]


def call(*words: str) -> Result:
    result = CliRunner().invoke(app, ["bench", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_time_inside_a_phase_is_not_counted_for_the_phase_around_it() -> None:
    stopwatch = timing.Stopwatch(torch.device("cpu"))
    times = iter([10.0, 12.0, 17.0, 18.0])  # outer begins, inner begins, inner ends, outer ends
    stopwatch.now = lambda: next(times)  # type: ignore[method-assign]
    with stopwatch.phase("outer"), stopwatch.phase("inner"):
        pass
    assert stopwatch.spent == {"inner": 5.0, "outer": 3.0}


def test_every_phase_of_a_round_is_timed(tmp_path: Path) -> None:
    out = tmp_path / "b.json"
    words = ("--dataset", "digits", "--lanes", "2", "--rounds", "2")
    output = call("round", *words, "--out", str(out))
    content = json.loads(out.read_text())
    (result,) = content["results"]
    assert content["commit"]
    assert content["device"]
    assert (result["lanes"], result["dataset"]) == (2, "digits")
    assert result["ms_per_lane_round"] > 0
    assert set(result["share"]) == {*timing.PHASES, "other"}
    assert sum(result["share"].values()) == pytest.approx(1, abs=0.01)
    assert all(result["share"][phase] > 0 for phase in timing.PHASES)
    head = next(line for line in output.output.splitlines() if line.startswith("dataset"))
    for column in ("ms per lane round", "tflops in training", *timing.PHASES):
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
    ("words", "named"),
    [
        (["round", "--dataset", "mnist"], "--dataset mnist"),
        (["round", "--lanes", "0"], "--lanes"),
        (["engine", "--trainer", "foo"], "engine.trainer"),
        (["engine", "--dataset", "digits", "--dataset", "mnist"], "--dataset mnist"),
        (["engine", "--precision", "bf16", "--device", "cpu"], "engine.precision=bf16"),
    ],
)
def test_a_mistake_writes_nothing(words: list[str], named: str, tmp_path: Path) -> None:
    with mistake_naming(named):
        CliRunner().invoke(
            app, ["bench", *words, "--out", str(tmp_path / "b")], catch_exceptions=False
        )
    assert not (tmp_path / "b").exists()


def test_a_trace_holds_the_recorded_rounds(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    listener = Profiled(Silent(), tmp_path / "r", rounds=4)
    run(
        {"rounds": 4, "data.clients": 8, "visibility.cluster_size": 4, "selection.k": 2},
        listener=listener,
    )
    events = json.loads((tmp_path / "r" / TRACE).read_text())["traceEvents"]
    assert any("ProfilerStep#2" in event.get("name", "") for event in events)
    with mistake("rounds"):
        Profiled(Silent(), tmp_path, rounds=2)
