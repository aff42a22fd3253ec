"""Wherever a stored file is read, a flipped bit in it is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_and_sweeps import SWEEP, copied, run_in, sweep_in

from fedglimpse.runs.folder import stored_environment
from fedglimpse.storage import store
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.plan import Plan, read_plan
from fedglimpse.studies.sweep.runner import SweepOptions, check_reusable, run_sweep
from fedglimpse.theory.panel import measure_run, read_panel
from mistakes import mistake_naming


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file that leaves JSON, if it is some, readable."""
    content = bytearray(path.read_bytes())
    digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
    position = digits[len(digits) // 2] if path.suffix == ".json" else len(content) // 2
    content[position] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run and a sweep, both finished."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "sweep.toml").write_text(SWEEP)
    run_in(folder / "run", resume=False, checkpoint__keep_models=0)
    sweep_in(folder / "sweep", folder / "sweep.toml")
    return folder


@pytest.fixture
def plan(whole: Path) -> Plan:
    return read_plan(whole / "sweep.toml")


def test_the_checkpoint_and_the_panel_of_theory(whole: Path, tmp_path: Path) -> None:
    run = copied(whole / "run", tmp_path / "run")
    measure_run(run, max_examples=10)
    flip(run / "theory.json")
    with mistake_naming("theory.json is damaged"):
        read_panel(run)
    flip(run / "checkpoint.pt")
    with mistake_naming("checkpoint.pt is damaged"):
        measure_run(run, max_examples=10)


def test_what_a_run_was_made_with(whole: Path, tmp_path: Path) -> None:
    run = copied(whole / "run", tmp_path / "run")
    flip(run / "environment.json")
    with mistake_naming("environment.json is damaged"):
        stored_environment(run)


@pytest.mark.parametrize("name", ["run/environment.json", "sweep/sweep.json"])
def test_what_a_report_reads(name: str, whole: Path, tmp_path: Path) -> None:
    folder, _, file = name.partition("/")
    copy = copied(whole / folder, tmp_path / folder)
    flip(copy / file)
    with mistake_naming(f"{file} is damaged"):
        load_study(copy)


def test_the_reason_of_a_failure(plan: Plan, tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    folder.fail(plan.cells[0], "reason 123456")
    flip(folder.of(plan.cells[0]) / "failed.json")
    with mistake_naming("failed.json is damaged"):
        folder.reason(plan.cells[0])


def test_records_that_are_packed(plan: Plan, tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    path = folder.of(plan.cells[0])
    path.mkdir(parents=True)
    store.commit(path, {"rounds.jsonl": b'{"round":123456}\n', "summary.json": b"{}"})
    flip(path / "rounds.jsonl")
    with mistake_naming("rounds.jsonl is damaged"):
        folder.tidy(plan.cells[0])
    assert (path / "rounds.jsonl").exists()


def test_results_that_are_reused(whole: Path, plan: Plan, tmp_path: Path) -> None:
    source = copied(whole / "sweep", tmp_path / "source")
    flip(source / "sweep.json")
    with mistake_naming("sweep.json is damaged"):
        check_reusable(source)
    source = copied(whole / "sweep", tmp_path / "source")
    flip(source / "cells" / plan.cells[0].id / "rounds.jsonl.gz")
    with mistake_naming("rounds.jsonl.gz is damaged"):
        run_sweep(plan, tmp_path / "o", SweepOptions(reuse=[source], quiet=True))
