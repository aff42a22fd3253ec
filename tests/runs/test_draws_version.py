"""Runs say which random draws they were made with, and are not mixed with others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from command_line import fedglimpse
from fedglimpse.runs.experiment import Stopped, run
from fedglimpse.runs.folder import run_identity
from fedglimpse.storage import store
from fedglimpse.studies.report.analysis import analyse
from fedglimpse.studies.report.page import page
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.study import CellResult, join_studies
from fedglimpse.studies.sweep.plan import read_plan
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep
from fedglimpse.theory.panel import measure_run
from fedglimpse.version import DRAWS
from mistakes import mistake

SMALL: dict[str, Any] = {
    "rounds": 3,
    "data.clients": 8,
    "visibility.cluster_size": 4,
    "selection.k": 2,
    "method": "fedavg",
}
SWEEP = """
title = "two methods"
methods = ["fedavg", "fedavg-window"]
[base]
seeds = [0]
rounds = 3
data.clients = 8
visibility.cluster_size = 4
selection.k = 2
[[settings]]
name = "digits"
"""


def drawn_before(folder: Path) -> None:
    """Let a run folder be one from before runs said with which draws they were made."""
    file = folder / "environment.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert stored.pop("draws") == DRAWS
    store.add(file, json.dumps(stored).encode())


def test_a_run_with_other_draws_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        run(SMALL, tmp_path / "r", should_stop=lambda: True)
    drawn_before(tmp_path / "r")
    with mistake("--out"):
        run(SMALL, tmp_path / "r", resume=True)


def test_a_finished_run_with_other_draws_is_read(tmp_path: Path) -> None:
    records = run(SMALL, tmp_path / "r").records
    drawn_before(tmp_path / "r")
    before = (tmp_path / "r" / "environment.json").read_text(encoding="utf-8")
    assert run(SMALL, tmp_path / "r", resume=True).records == records
    assert (tmp_path / "r" / "environment.json").read_text(encoding="utf-8") == before
    study = load_study(tmp_path / "r")
    participation = study.cells[0].participation
    assert participation is not None
    assert participation.classes_covered is None  # who held what cannot be computed again
    assert study.cells[0].facts is not None


def test_a_comparison_is_not_completed_with_other_draws(tmp_path: Path) -> None:
    words = [f"{key}={value}" for key, value in SMALL.items() if key != "method"]
    words += ["--out", str(tmp_path), "--quiet"]
    two = ["compare", "fedavg", "fedavg-window"]
    assert fedglimpse(*two, *words).returncode == 0
    drawn_before(tmp_path / "fedavg")
    assert fedglimpse(*two, *words, "--resume").returncode == 0  # nothing is left to run
    mixed = fedglimpse(*two, "oort", *words, "--resume")
    assert mixed.returncode == 2
    assert "draws" in mixed.stderr
    assert not (tmp_path / "oort").exists()


def test_a_sweep_is_not_completed_with_other_draws(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(SWEEP, encoding="utf-8")
    plan = read_plan(tmp_path / "two.toml")
    old = tmp_path / "old"
    run_sweep(plan, old, SweepOptions(quiet=True, only=["method=fedavg"]))
    cell = old / "cells" / plan.cells[0].id
    drawn_before(cell)
    with mistake("--out"):
        run_sweep(plan, old, SweepOptions(quiet=True))
    run_sweep(plan, tmp_path / "new", SweepOptions(quiet=True, without=[old], reuse=[old]))
    for planned in plan.cells:
        stored = tmp_path / "new" / "cells" / planned.id / "environment.json"
        assert json.loads(stored.read_text(encoding="utf-8"))["draws"] == DRAWS


def test_theory_is_not_measured_on_other_data(tmp_path: Path) -> None:
    run({**SMALL, "checkpoint.keep_models": 1}, tmp_path / "r")
    drawn_before(tmp_path / "r")
    with mistake("--out"):
        measure_run(tmp_path / "r")


def test_draws_are_part_of_what_a_run_is(tmp_path: Path) -> None:
    run({**SMALL, "seeds": [0, 1]}, tmp_path / "r")
    study = load_study(tmp_path / "r")
    old_cells: list[CellResult] = []
    for cell in study.cells:
        environment = {name: v for name, v in cell.environment.items() if name != "draws"}
        old_cells.append(dataclasses.replace(cell, environment=environment))
    old = dataclasses.replace(study, cells=old_cells)
    with mistake():
        join_studies([study, old], "here")
    assert run_identity(SMALL) != run_identity(SMALL, draws=1)

    mixed = dataclasses.replace(study, cells=[study.cells[0], old_cells[1]])
    sentence = "versions 1 and 2 of the random draws"
    assert sentence in page(analyse(mixed))
    assert sentence not in page(analyse(study))
