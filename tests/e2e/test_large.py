"""Long and large: what grows with the number of rounds, lanes, clients, cells and runs."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedglimpse.runs.experiment import run
from fedglimpse.runs.folder import as_json
from fedglimpse.storage import store
from fedglimpse.studies.sweep.plan import read_plan
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep
from fedglimpse.version import DRAWS
from processes import environment

ROOT = Path(__file__).parents[2]
MIB = 2**20
TINY = {
    "data.clients": 2, "data.samples": 40, "data.partition": "iid", "visibility.kind": "full",
    "selection.k": 1, "local.epochs": 1,
}  # fmt: skip


def resident_bytes() -> int:
    """Return how much memory this process takes."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * resource.getpagesize()


@pytest.mark.parametrize(
    "rounds", [pytest.param(100_000, marks=pytest.mark.slow), 2_000], ids=["100,000", "2,000"]
)
def test_memory_and_open_files_stay_flat(rounds: int, tmp_path: Path) -> None:
    """Between a tenth of the run and its end."""
    memory: list[int] = []
    files: list[int] = []

    def look() -> bool:
        look.rounds += 1  # type: ignore[attr-defined]
        if look.rounds % (rounds // 10) == 0:  # type: ignore[attr-defined]
            memory.append(resident_bytes())
            files.append(len(os.listdir("/proc/self/fd")))
        return False

    look.rounds = 0  # type: ignore[attr-defined]
    every = {"evaluate.every": rounds // 10, "checkpoint.every": rounds // 10}
    settings = {**TINY, **every, "rounds": rounds}
    result = run(settings, tmp_path / "r", should_stop=look)
    print("MiB at a tenth and at the end", memory[0] / MIB, memory[-1] / MIB, "files", files[-1])
    assert result.summary["rounds"] == rounds
    assert files[-1] == files[0]
    assert memory[-1] - memory[0] < 8 * MIB


@pytest.mark.slow
def test_two_hundred_lanes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "glimpse", "rounds": 3, "seeds": list(range(200))}
    result = run({**settings, "data.clients": 8, "visibility.cluster_size": 4}, tmp_path / "r")
    assert len(result.records) == 600
    assert len(result.summary["seeds"]) == 200


CLIENTS = """
import json
from pathlib import Path
from fedglimpse.runs.experiment import run
result = run({
    "data.name": "synthetic", "data.clients": 10_000, "data.samples": 20, "method": "glimpse",
    "visibility.kind": "mobile", "visibility.cluster_size": 1_000, "selection.k": 20, "rounds": 3,
})
print(json.dumps({
    "kib": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]),
    "visible": [len(record["visible"]) for record in result.records],
}))
"""


@pytest.mark.slow
def test_ten_thousand_clients_of_which_a_thousand_are_visible() -> None:
    done = run_python(CLIENTS)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["visible"] == [1_000] * 3
    assert found["kib"] < 4 * MIB  # KiB: 4 GiB


def run_python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words], env=environment(), capture_output=True, text=True,
        timeout=600, check=True,
    )  # fmt: skip


def record(round_num: int, seed: int) -> dict[str, Any]:
    visible = [(round_num + i) % 40 for i in range(10)]
    return {
        "lane": 0, "seed": seed, "round": round_num, "visible": sorted(visible),
        "selected": visible[:5], "rejected": [], "weights": [0.2] * 5, "accuracy": 0.5,
        "macro_f1": 0.5, "per_class_f1": [0.5] * 10, "loss": 1.0, "train_loss": 1.0,
        "reward": 0.5, "uplink_bytes": 2000, "downlink_bytes": 2000, "client_flops": 9000,
        "server_flops": 500, "seconds": 0.01,
    }  # fmt: skip


def finish_cells(file: Path, out: Path, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write every cell of a sweep as if it had been run."""
    sources = json.dumps({"fedglimpse": "0.1.0", "draws": DRAWS}).encode()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for cell in read_plan(file).cells:
            folder = out / "cells" / cell.id
            folder.mkdir(parents=True)
            lines = [as_json(record(t, cell.seed)) + "\n" for t in range(rounds)]
            contents = {
                "config.toml": cell.config({}).to_toml().encode(),
                "environment.json": sources,
                "rounds.jsonl.gz": gzip.compress("".join(lines).encode(), mtime=0),
                "summary.json": b"{}",
            }
            store.commit(folder, contents)


def sweep_file(folder: Path, cells: int, rounds: int) -> Path:
    methods = ["fedavg", "fedavg-window", "fedprox", "glimpse", "oort"]
    file = folder / "large.toml"
    file.write_text(
        f'title = "Large"\nmethods = {methods}\n[base]\nrounds = {rounds}\n'
        f'seeds = {list(range(cells // 5))}\n[[settings]]\nname = "digits"\n'
    )
    return file


@pytest.mark.slow
def test_five_thousand_cells_are_planned_and_resumed_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sweep_file(tmp_path, 5_000, rounds=20)
    finish_cells(file, tmp_path / "o", 20, monkeypatch)
    for _ in range(2):  # the first time, the plan is written
        began = time.monotonic()
        outcome = run_sweep(read_plan(file), tmp_path / "o", SweepOptions(quiet=True))
        seconds = time.monotonic() - began
        print("seconds", seconds)
        assert (outcome.done, outcome.left) == (5_000, 0)
        assert seconds < 10


REPORT = """
import json, sys, time
from pathlib import Path
from fedglimpse.cli.main import main
began = time.monotonic()
sys.argv = ["fedglimpse", "report", sys.argv[1]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(json.dumps({
    "kib": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]),
    "seconds": time.monotonic() - began,
}))
"""


@pytest.mark.slow
def test_a_report_of_five_hundred_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sweep_file(tmp_path, 500, rounds=200)
    out = tmp_path / "o"
    finish_cells(file, out, 200, monkeypatch)
    assert run_sweep(read_plan(file), out, SweepOptions(quiet=True)).done == 500
    found = json.loads(run_python(REPORT, str(out)).stdout.splitlines()[-1])
    print(found)
    assert found["seconds"] < 30
    assert found["kib"] < MIB  # KiB: 1 GiB
