"""The same run through Flower's simulation and through ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")
pytest.importorskip("ray", reason="needs fedglimpse[flower]")

from flower_processes import APP, quiet_environment
from run_folder_schema import check_run_folder

from fedglimpse.config.loading import parse_overrides, resolve
from fedglimpse.runs import experiment

WORDS = [
    "method=glimpse",
    "rounds=5",
    "data.clients=10",
    "data.partition=label_skew",
    "selection.k=3",
    "visibility.kind=mobile",
    "visibility.cluster_size=5",
    "local.epochs=2",
    "agent.learn_start=1",
    "agent.n_step=1",
    "model.name=task:make_model",
    "engine.trainer=serial",
]


@pytest.mark.slow
@pytest.mark.processes
def test_flowers_simulation_and_ours_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = quiet_environment(tmp_path / "home")
    environment["PYTHONPATH"] += f"{os.pathsep}{APP}"
    script = Path(__file__).with_name("flower_simulation.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run"), *WORDS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    flower = check_run_folder(tmp_path / "run")
    monkeypatch.syspath_prepend(str(APP))
    ours = experiment.run(resolve(parse_overrides(WORDS)))
    for there, here in zip(flower, ours.records, strict=True):
        assert there["visible"] == here["visible"]
        assert there["selected"] == here["selected"]
        assert there["behaviour"] == here["behaviour"]
        assert there["reward"] == pytest.approx(here["reward"], rel=1e-5)
    assert "td_loss" in flower[-1]  # the agent has learnt, in both
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["federation"]["state"]
    torch.testing.assert_close(state, ours.world.states[0], rtol=1e-4, atol=1e-5)
