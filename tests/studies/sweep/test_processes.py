"""Sweeps as a user runs them: real processes, killed, cut by a budget, copied elsewhere."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from sweeps import ROOT, SMALL, SWEEP, environment, results, write

from signalled import command, cuts

ONE_PROCESS = ["--workers", "1", "--lanes", "4"]
FILE = SMALL.replace("rounds = 8", "rounds = 30")


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWEEP, *ONE_PROCESS, *words], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def signalled(name: str, at: int, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(name, at, folder), "sweep", *ONE_PROCESS, *words], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def begin(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SWEEP, *ONE_PROCESS, *words], cwd=ROOT, env=environment(), stderr=subprocess.PIPE,
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


@dataclass(frozen=True)
class Whole:
    """A sweep that nothing disturbed."""

    out: Path
    operations: int  # on files in its folder
    seconds: float  # imports included


@pytest.fixture(scope="module")
def whole(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    out, began = tmp_path_factory.mktemp("whole") / "o", time.monotonic()
    done = signalled("SIGKILL", 0, out, str(file), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "8 cells done, 0 left, 0 failed" in done.stdout
    assert "cells: 0 done, 4 running, 4 left" in done.stderr
    assert "to go" in done.stderr
    return Whole(out, int(done.stdout.split()[-1]), time.monotonic() - began)


@pytest.mark.slow
def test_killed_five_times_it_ends_with_the_same_results(
    file: Path, whole: Whole, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    for at in cuts(random.Random(11), whole.operations):
        done = signalled("SIGKILL", at, out, str(file), "--out", str(out), "--quiet")
        assert done.returncode == -signal.SIGKILL, done.stdout
    assert call(str(file), "--out", str(out)).returncode == 0
    assert results(out) == results(whole.out)
    leftovers = {p.name for p in out.rglob("*") if p.is_file()}
    assert leftovers == {
        "sweep.json", "config.toml", "environment.json", "rounds.jsonl.gz", "summary.json",
        "manifest.json",
    }  # fmt: skip


@pytest.mark.slow
def test_cut_by_its_budget_copied_and_continued(file: Path, whole: Whole, tmp_path: Path) -> None:
    first, second = tmp_path / "here", tmp_path / "there" / "o"
    for share in (2.5, 5.0, 10.0):  # the machine may have been busier when the whole was timed
        shutil.rmtree(first, ignore_errors=True)
        budget, began = max(3.0, whole.seconds / share), time.monotonic()
        cut = call(str(file), "--out", str(first), "--budget", f"{budget:.1f}")
        assert time.monotonic() - began < budget + 30  # and the time that imports take here
        assert cut.returncode == 0, cut.stderr
        if "8 cells done" not in cut.stdout:
            break
    assert "Rerun the same command" in cut.stderr
    assert "8 cells done" not in cut.stdout
    assert 0 < lines(first) < 240
    shutil.copytree(first, second)
    shutil.rmtree(first)
    assert call(str(file), "--out", str(second)).returncode == 0
    assert results(second) == results(whole.out)


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
    assert "Rerun the same command" in err
    assert "Traceback" not in err
    assert len(list(out.glob("cells/*/checkpoint.pt"))) == 4
    assert not (out / "sweep.lock").exists()
