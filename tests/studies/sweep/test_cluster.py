"""A sweep on Ray: a cluster of two nodes on this machine, started and ended by the test."""

from __future__ import annotations

import builtins
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sweeps import SMALL, environment, results, write

from fedglimpse.errors import UserError
from fedglimpse.studies.sweep.cluster import (
    Cluster,
    PackTask,
    join,
    read_files,
    run_task,
    write_files,
)
from fedglimpse.studies.sweep.plan import configs_of, read_plan
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep

QUIET = SweepOptions(quiet=True, lanes=2)


def test_without_ray_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match="pip install"):
        join("auto")


def test_a_parcel_is_played_in_slices_and_comes_home(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path))
    cells = plan.cells[:2]
    configs = [configs_of(cells, {})[c.id] for c in cells]
    rounds = 0

    def three() -> bool:
        nonlocal rounds
        rounds += 1
        return rounds % 3 == 0

    homes = [tmp_path / c.id for c in cells]
    for expected in (3, 6, 8):
        played = run_task(PackTask(configs, [read_files(h) for h in homes], 600.0), three)
        assert played.reason == ""
        for home, files in zip(homes, played.files, strict=True):
            write_files(files, home)
            assert (home / "rounds.jsonl").read_text().count("\n") == expected
    assert all((home / "summary.json").exists() for home in homes)


def test_a_worker_of_another_version_says_so(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path))
    config = plan.cells[0].config({})
    played = run_task(PackTask([config], [{}], 600.0, version="0.0.1"), lambda: False)
    assert "0.0.1" in played.reason


def test_files_arrive_in_an_order_that_may_be_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(Path, "replace", lambda self, target: order.append(Path(target).name))
    names = ["summary.json", "checkpoint.pt", "environment.json", "config.toml", "rounds.jsonl"]
    write_files(dict.fromkeys(names, b""), tmp_path)
    order = [name for name in order if name != "manifest.json"]
    assert order[0] == "config.toml"
    assert order[-2:] == ["checkpoint.pt", "summary.json"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="the package ray is not installed")
    from ray.cluster_utils import Cluster as Nodes

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0").items():
            patch.setenv(name, value)
        memory = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
        nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 1, **memory})
        nodes.add_node(num_cpus=1, num_gpus=1, object_store_memory=100 * 2**20)
        nodes.wait_for_nodes()
        yield nodes
        nodes.shutdown()


@pytest.mark.slow
@pytest.mark.processes
def test_two_nodes_give_the_results_of_one_machine(cluster: Any, tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path))
    run_sweep(plan, tmp_path / "here", QUIET)
    engine = Cluster(cluster.address, gpus=0.0)
    engine.slice = 3.0  # packs come home unfinished and go out again
    ended = run_sweep(plan, tmp_path / "there", QUIET, engine.run_packs)
    assert (ended.done, ended.left, ended.failed) == (8, 0, {})
    assert results(tmp_path / "there") == results(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.processes
def test_packs_may_share_a_gpu_and_only_the_guilty_cell_fails(cluster: Any, tmp_path: Path) -> None:
    guilty = '[[variants]]\nname = "guilty"\nmethod = "fedavg"\ndata.partition = "subject"\n'
    text = SMALL.replace(', "glimpse"]', "]").replace("rounds = 8", "rounds = 2") + guilty
    plan = read_plan(write(tmp_path, text))  # only where the data lies is it known to fail
    engine = Cluster(cluster.address, gpus=0.5, cpus=0.5)
    how = SweepOptions(only=["seed=0", "setting=*mobile"], lanes=2, quiet=True)
    ended = run_sweep(plan, tmp_path / "o", how, engine.run_packs)
    assert (ended.done, ended.left) == (1, 0)
    assert list(ended.failed) == ["digits-mobile--guilty--s0"]
    assert "data.partition=subject" in ended.failed["digits-mobile--guilty--s0"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_worker_is_retried(cluster: Any, tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil", reason="psutil finds the worker to kill")
    killed: list[int] = []

    def kill_one() -> None:
        deadline = time.monotonic() + 120
        while not killed and time.monotonic() < deadline:
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    name = child.cmdline()[:1]  # empty while a process begins or ends
                    if name and "ray::_work" in name[0]:
                        killed.append(child.pid)
                        child.kill()
                        return
            time.sleep(0.05)

    plan = read_plan(write(tmp_path))
    how = SweepOptions(only=["seed=0", "variant=fedavg"], lanes=2, quiet=True)
    run_sweep(plan, tmp_path / "here", how)
    killer = threading.Thread(target=kill_one)
    killer.start()
    ended = run_sweep(plan, tmp_path / "there", how, Cluster(cluster.address, gpus=0.0).run_packs)
    killer.join()
    assert killed
    assert (ended.done, ended.failed) == (2, {})
    assert results(tmp_path / "there") == results(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.processes
def test_a_budget_calls_everyone_home(cluster: Any, tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, SMALL.replace("rounds = 8", "rounds = 20000")))
    engine = Cluster(cluster.address, gpus=0.0)
    ended = run_sweep(
        plan, tmp_path / "o", SweepOptions(budget=20, lanes=4, quiet=True), engine.run_packs
    )
    assert (ended.done, ended.left) == (0, 8)
    begun = list((tmp_path / "o").glob("cells/*/checkpoint.pt"))
    assert len(begun) in (4, 8)


@pytest.mark.slow
@pytest.mark.processes
def test_what_no_node_has_is_refused(cluster: Any, tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path))
    with pytest.raises(UserError, match="64 CPUs"):
        run_sweep(plan, tmp_path / "o", QUIET, Cluster(cluster.address, cpus=64.0).run_packs)


@pytest.mark.slow
@pytest.mark.processes
def test_no_cluster_there(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the package ray is not installed")
    with pytest.raises(UserError, match="ray start --head"):
        join("127.0.0.1:1")
