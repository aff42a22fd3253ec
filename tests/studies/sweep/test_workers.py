"""Sweeps in several processes: the results of one, whatever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sweeps import ROOT, SMALL, SWEEP, environment, results, write

from fedglimpse.cli.options import read_number
from fedglimpse.data.shared import SharedDataset
from fedglimpse.data.sources import load
from fedglimpse.studies.sweep.plan import read_plan
from fedglimpse.studies.sweep.progress import CellWork, SweepStatus
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep
from fedglimpse.studies.sweep.workers import RoundCounter
from mistakes import mistake

SECONDS = 240  # after which something is taken to hang
MOST_MEMORY = 600 * 2**20  # bytes of a worker, beyond what it shares
FILE = SMALL.replace("rounds = 8", "rounds = 30")
LONG = SMALL.replace("rounds = 8", "rounds = 20000")
LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc")


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended with the test."""
    begun: list[subprocess.Popen[str]] = []
    yield begun
    for process in begun:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=SECONDS)


def begin(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*SWEEP, *words], cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def call(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SWEEP, *words], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip


def workers_of(out: Path) -> set[int]:
    """Return the processes that run cells of a sweep: those whose locks name them."""
    found: set[int] = set()
    for lock in out.glob("cells/*/run.lock"):
        try:
            words = lock.read_text().split('"pid": ')
        except FileNotFoundError:
            continue
        if len(words) == 2:
            found.add(int(words[1].split(",")[0]))
    return {pid for pid in found if Path(f"/proc/{pid}").exists()}


def rounds_on_disk(out: Path) -> int:
    finished = 30 * len(list(out.glob("cells/*/summary.json")))
    rounds = 0
    for records in out.glob("cells/*/rounds.jsonl"):
        try:
            rounds += records.read_bytes().count(b"\n")
        except FileNotFoundError:
            continue  # it was compressed while we looked
    return finished + rounds


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_processes_give_the_results_of_one(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path))
    short = {"only": ["setting=*mobile"], "lanes": 2, "quiet": True}
    run_sweep(plan, tmp_path / "one", SweepOptions(workers=1, **short))
    outcome = run_sweep(plan, tmp_path / "two", SweepOptions(workers=2, **short))
    assert (outcome.done, outcome.left, outcome.failed) == (4, 0, {})
    assert results(tmp_path / "two") == results(tmp_path / "one")
    assert (tmp_path / "two" / "sweep.json").read_text() == (
        tmp_path / "one" / "sweep.json"
    ).read_text()


@pytest.mark.parametrize("text", ["0", "x", "-1", "1.5", "²", ""])
def test_a_number_of_workers_that_is_none_is_refused(text: str) -> None:
    with mistake("--workers"):
        read_number("--workers", text)


def test_workers_are_not_those_of_a_cluster() -> None:
    assert read_number("--workers", "auto", has_effect=False) is None
    assert read_number("--workers", "3") == 3
    with mistake("--workers"):
        read_number("--workers", "3", has_effect=False)


def test_shared_data_are_the_data() -> None:
    for name in ("digits", "synthetic"):
        dataset = load(name)
        shared = SharedDataset.of(dataset).dataset()
        assert (shared.name, shared.label, shared.num_classes) == (
            dataset.name, dataset.label, dataset.num_classes,
        )  # fmt: skip
        for field in ("x_train", "y_train", "x_test", "y_test"):
            assert getattr(shared, field).equal(getattr(dataset, field))
            assert getattr(shared, field).dtype == getattr(dataset, field).dtype
        assert shared.subjects is None


def test_rounds_are_counted_as_a_file_grows_and_is_cut_back(tmp_path: Path) -> None:
    counter = RoundCounter()
    file = tmp_path / "rounds.jsonl"
    assert counter.of(file) == 0
    for content, lines in ((b"a\nb", 1), (b"a\nb\nc\n", 3), (b"a\n", 1), (b"a\nb\n", 2)):
        file.write_bytes(content)
        assert counter.of(file) == lines
    file.unlink()
    assert counter.of(file) == 0


def test_the_end_is_estimated_from_cells_that_run_at_once() -> None:
    status = SweepStatus({"a": CellWork("x", 10, 0), "b": CellWork("x", 10, 4)}, 0, 0)
    status.run(["a", "b"])
    status.advanced("a", 5, seconds=0.5)
    status.advanced("b", 9, seconds=0.5)
    assert status.seconds_left() == pytest.approx(0.1 * (5 + 1))
    status.advanced("b", 6, seconds=0.0)  # cut back to its checkpoint
    assert status.seconds_left() == pytest.approx(0.1 * (5 + 4))


@LINUX
@pytest.mark.slow
@pytest.mark.processes
def test_worker_and_command_are_killed_and_nothing_is_lost(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    file = str(write(tmp_path, FILE))
    assert call([file, "--out", str(tmp_path / "whole"), "--workers", "1", "-q"]).returncode == 0
    out = tmp_path / "o"
    words = [file, "--out", str(out), "--workers", "2", "-q"]
    command = begin(words)
    processes.append(command)
    wait_until(lambda: rounds_on_disk(out) > 20 and workers_of(out))
    killed = min(workers_of(out))
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: len(workers_of(out)) == 2 and killed not in workers_of(out))
    before = rounds_on_disk(out)
    wait_until(lambda: rounds_on_disk(out) > before + 10)
    assert command.poll() is None
    workers = workers_of(out)
    command.kill()
    command.communicate(timeout=SECONDS)
    resumed = call(words)  # at once, beside workers that may not have noticed yet
    assert resumed.returncode == 0, resumed.stderr
    assert "8 cells done, 0 left, 0 failed" in resumed.stdout
    assert results(out) == results(tmp_path / "whole")
    for worker in workers:
        assert not Path(f"/proc/{worker}").exists()
    undisturbed = {path.name for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    assert {path.name for path in out.rglob("*") if path.is_file()} == undisturbed


@LINUX
@pytest.mark.slow
@pytest.mark.processes
def test_two_shards_are_killed_once_each_and_reported_together(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    file = str(write(tmp_path, FILE))
    assert call([file, "--out", str(tmp_path / "whole"), "--workers", "1", "-q"]).returncode == 0
    out = tmp_path / "o"
    common = ["--out", str(out), "--workers", "1", "--lanes", "4", "-q"]
    words = [[file, *common, "--shard", f"{number}/2"] for number in (1, 2)]
    for shard in words:
        processes.append(begin(shard))
    wait_until(lambda: rounds_on_disk(out) > 40 and len(workers_of(out)) == 2)
    for process in processes:
        assert process.poll() is None
        process.kill()
        process.communicate(timeout=SECONDS)
    for shard in words:
        resumed = call(shard)
        assert "4 cells done, 0 left, 0 failed" in resumed.stdout, resumed.stderr
    assert results(out) == results(tmp_path / "whole")


@LINUX
@pytest.mark.slow
@pytest.mark.processes
def test_ctrl_c_stops_every_worker_at_a_checkpoint(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    out = tmp_path / "o"
    words = [str(write(tmp_path, LONG)), "--out", str(out), "--workers", "2", "--lanes", "4"]
    command = begin(words)
    processes.append(command)
    wait_until(lambda: len(workers_of(out)) == 2 and rounds_on_disk(out) > 16)
    for process in (command.pid, *workers_of(out)):  # as a terminal sends it to all of them
        os.kill(process, signal.SIGINT)
    _, errors = command.communicate(timeout=SECONDS)
    assert command.returncode == 130, errors
    assert "Rerun the same command" in errors
    assert "Traceback" not in errors
    assert len(list(out.glob("cells/*/checkpoint.pt"))) == 8
    assert not workers_of(out)
    assert not list(out.rglob("*.lock"))


@LINUX
@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_keeps_little_to_itself(
    tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    out = tmp_path / "o"
    words = [str(write(tmp_path, LONG)), "--out", str(out), "--workers", "2", "--lanes", "4"]
    processes.append(begin(words))
    wait_until(lambda: len(workers_of(out)) == 2 and rounds_on_disk(out) > 200)
    for worker in workers_of(out):
        private = 0
        for line in Path(f"/proc/{worker}/smaps_rollup").read_text().splitlines():
            if line.startswith("Private_"):
                private += 1024 * int(line.split()[1])
        print(f"worker {worker}: {private / 2**20:.0f} MiB of its own")
        assert private <= MOST_MEMORY


@pytest.mark.slow
@pytest.mark.processes
def test_a_cell_whose_workers_die_is_found_and_the_others_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    text = SMALL.replace('methods = ["fedavg", "glimpse"]', 'methods = ["fedavg"]')
    deadly = '[[variants]]\nname = "deadly"\nmethod = "worker_methods:build"\n'
    plan = read_plan(write(tmp_path, text + deadly))
    options = SweepOptions(only=["setting=*mobile", "seed=0"], lanes=2, workers=2, quiet=True)
    outcome = run_sweep(plan, tmp_path / "o", options)
    assert (outcome.done, outcome.left) == (1, 0)
    assert list(outcome.failed) == ["digits-mobile--deadly--s0"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_budget_stops_every_worker(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, LONG))
    options = SweepOptions(budget=15, workers=2, lanes=4, quiet=True)
    began = time.monotonic()
    outcome = run_sweep(plan, tmp_path / "o", options)
    assert time.monotonic() - began < 60
    assert (outcome.done, outcome.left, outcome.interrupted) == (0, 8, False)
    assert len(list((tmp_path / "o").glob("cells/*/checkpoint.pt"))) == 8
