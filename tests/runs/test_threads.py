"""How many threads a run uses: chosen from model and machine, stored, used again on resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import EngineConfig
from fedglimpse.flower.device import local_training
from fedglimpse.runs import threads
from fedglimpse.runs.experiment import Stopped, run, run_together
from fedglimpse.runs.progress import Silent
from fedglimpse.runs.threads import (
    automatic_threads,
    cgroup_cores,
    choose_threads,
    threads_of_run,
    using_threads,
)
from mistakes import mistake

DENSE = nn.Linear(4, 4)
CONVOLUTIONS = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.LazyLinear(2))
CONVOLUTIONS(torch.zeros(1, 1, 8, 8))
SMALL = {"rounds": 4, "data.clients": 12, "visibility.cluster_size": 4, "selection.k": 2}


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight cores whose user has set nothing."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "available_cores", lambda: 8)


class ThreadsSeen(Silent):
    """Notes with how many threads rounds are computed."""

    def __init__(self) -> None:
        self.counts: set[int] = set()

    def round(self, records: Any) -> None:
        self.counts.add(torch.get_num_threads())


def test_small_dense_models_get_one_thread_and_convolutions_those_that_pay() -> None:
    assert choose_threads(DENSE, 64) == 1
    assert choose_threads(nn.Linear(3000, 2000), 2) == 2
    assert choose_threads(CONVOLUTIONS, 1) == 1
    assert choose_threads(CONVOLUTIONS, 2) == 2
    assert choose_threads(CONVOLUTIONS, 64) == threads.MOST_THREADS


@pytest.mark.usefixtures("eight_cores")
def test_what_a_user_says_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    automatic = EngineConfig()
    assert threads_of_run(automatic, DENSE) == 1
    assert threads_of_run(automatic, CONVOLUTIONS) == 8
    assert threads_of_run(automatic, CONVOLUTIONS, most=1) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert threads_of_run(automatic, DENSE) == 3
    assert threads_of_run(automatic, DENSE, most=1) == 1
    (tmp_path / "environment.json").write_text('{"threads": 5}')
    assert threads_of_run(automatic, DENSE, [tmp_path / "new", tmp_path], most=1) == 5
    assert threads_of_run(EngineConfig(threads=7), DENSE, [tmp_path], most=1) == 7
    for unclear in ("", "many", "0"):
        monkeypatch.setenv("OMP_NUM_THREADS", unclear)
        assert automatic_threads(DENSE) == 1


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_number_that_is_none_is_refused(value: str) -> None:
    with mistake("engine.threads"):
        run({"engine.threads": json.loads(value) if value != "many" else value})


@pytest.mark.parametrize(
    ("files", "group", "cores"),
    [
        ({}, "0::/", None),
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "150000 100000"}, "0::/", 1.5),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 4.0),
        ({"cpu.max": "200000 100000"}, "0::/outside/of/the/container", 2.0),
        (
            {"cpu/c/cpu.cfs_quota_us": "50000", "cpu/c/cpu.cfs_period_us": "100000"},
            "4:memory:/c\n3:cpu,cpuacct:/c",
            0.5,
        ),
        (
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            "3:cpu,cpuacct:/",
            None,
        ),
    ],
)
def test_the_quota_of_a_container_counts(
    files: dict[str, str], group: str, cores: float | None, tmp_path: Path
) -> None:
    for name, content in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")
    membership = tmp_path / "membership"
    assert cgroup_cores(tmp_path / "groups", membership) is None
    membership.write_text(group + "\n")
    assert cgroup_cores(tmp_path / "groups", membership) == cores


def test_a_quota_limits_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    for quota, cores in ((None, 6), (0.5, 1), (2.5, 2), (64.0, 6)):
        monkeypatch.setattr(threads, "cgroup_cores", lambda quota=quota: quota)
        assert threads.available_cores() == cores


def test_the_number_of_before_returns_even_after_an_error() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def fail() -> None:
        with using_threads(before + 1):
            seen.append(torch.get_num_threads())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [before + 1]
    with using_threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before


def test_a_run_stores_its_threads_and_is_resumed_with_them(tmp_path: Path) -> None:
    calls = iter([False, True])
    with pytest.raises(Stopped):
        run({**SMALL, "engine.threads": 2}, tmp_path, should_stop=lambda: next(calls))
    stored = json.loads((tmp_path / "environment.json").read_text())
    assert stored["threads"] == 2
    seen = ThreadsSeen()
    run(SMALL, tmp_path, resume=True, listener=seen)
    assert seen.counts == {2}
    assert torch.get_num_threads() == 1
    assert json.loads((tmp_path / "environment.json").read_text())["threads"] == 2


def test_an_explicit_number_wins_on_resuming(tmp_path: Path) -> None:
    calls = iter([False, True])
    with pytest.raises(Stopped):
        run({**SMALL, "engine.threads": 2}, tmp_path, should_stop=lambda: next(calls))
    seen = ThreadsSeen()
    run({**SMALL, "engine.threads": 3}, tmp_path, resume=True, listener=seen)
    assert seen.counts == {3}


@pytest.mark.usefixtures("eight_cores")
def test_runs_side_by_side_keep_to_their_cores() -> None:
    seen = ThreadsSeen()
    run_together([(resolve({**SMALL, "rounds": 1}), None)], listener=seen, cores=1)
    assert seen.counts == {1}


def test_a_device_trains_with_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    counts: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            counts.append(torch.get_num_threads())
            return super().forward(x)

    train = local_training(lambda settings: (torch.zeros(4, 3), torch.tensor([0, 1, 0, 1])))
    local = {"local.batch_size": 2, "local.epochs": 1}
    train(Counting(3, 2), {**local, "seed": 0, "round": 0, "client": 0, "visit": 0})
    assert set(counts) == {2}
    assert torch.get_num_threads() == 1
