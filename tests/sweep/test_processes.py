"""Sweeps as a user runs them: real processes, killed, cut by a budget, copied elsewhere."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from sweeps import ROOT, SMALL, SWEEP, environment, results, write

FILE = SMALL.replace("rounds = 8", "rounds = 30")


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWEEP, *words], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def begin(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SWEEP, *words], cwd=ROOT, env=environment(), stderr=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def lines(out: Path) -> int:
    """Count the rounds that are on disk; finished cells count as 30."""
    done = 30 * len(list(out.glob("cells/*/summary.json")))
    going = list(out.glob("cells/*/rounds.jsonl"))
    return done + sum(p.read_bytes().count(b"\n") for p in going if p.exists())


def wait_for_rounds(out: Path, process: subprocess.Popen[str], number: int) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if lines(out) >= number:
                return
        except FileNotFoundError:
            pass  # it was packed while we looked
        time.sleep(0.01)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("file"), FILE)


@pytest.fixture(scope="module")
def undisturbed(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "o"
    done = call(str(file), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "8 cells done, 0 left, 0 failed" in done.stdout
    assert "cells: 0 done, 4 running, 4 left" in done.stderr
    assert "to go" in done.stderr
    return out


@pytest.mark.slow
def test_killed_five_times_it_ends_with_the_same_results(
    file: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out, chance = tmp_path / "o", random.Random(11)
    kills = 0
    for goal in sorted(chance.randrange(1, 240) for _ in range(5)):
        process = begin(str(file), "--out", str(out), "--quiet")
        wait_for_rounds(out, process, max(goal, lines(out) + 1))
        time.sleep(chance.random() * 0.1)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert kills == 5
    assert call(str(file), "--out", str(out)).returncode == 0
    assert results(out) == results(undisturbed)
    leftovers = {p.name for p in out.rglob("*") if p.is_file()}
    assert leftovers == {
        "sweep.json", "config.toml", "environment.json", "rounds.jsonl.gz", "summary.json",
    }  # fmt: skip


@pytest.mark.slow
def test_cut_by_its_budget_copied_and_continued(
    file: Path, undisturbed: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "here", tmp_path / "there" / "o"
    began = time.monotonic()
    cut = call(str(file), "--out", str(first), "--budget", "4")
    assert time.monotonic() - began < 4 + 30  # and the time that imports take here
    assert cut.returncode == 0, cut.stderr
    assert "Go on with the same command" in cut.stderr
    assert "8 cells done" not in cut.stdout
    assert 0 < lines(first) < 240
    shutil.copytree(first, second)
    shutil.rmtree(first)
    assert call(str(file), "--out", str(second)).returncode == 0
    assert results(second) == results(undisturbed)


def test_ctrl_c_and_a_second_sweep_in_the_folder(tmp_path: Path) -> None:
    file, out = write(tmp_path, SMALL.replace("rounds = 8", "rounds = 20000")), tmp_path / "o"
    words = [str(file), "--out", str(out), "--only", "variant=fedavg"]
    process = begin(*words)
    wait_for_rounds(out, process, 3)
    second = call(*words)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert second.returncode == 2
    assert f"in use by another sweep (process {process.pid}" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
    assert process.returncode == 130, err
    assert "Go on with the same command" in err
    assert "Traceback" not in err
    assert len(list(out.glob("cells/*/checkpoint.pt"))) == 4
    assert not (out / "sweep.lock").exists()
