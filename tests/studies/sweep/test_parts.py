"""The parts a sweep is made of, one by one: lock, folder, packs, stop, status."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sweeps import SMALL, write

from fedglimpse.errors import UserError
from fedglimpse.storage import store
from fedglimpse.storage.lock import locked
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.packs import begun_first, make_packs
from fedglimpse.studies.sweep.plan import Plan, read_plan
from fedglimpse.studies.sweep.progress import CellWork, SweepProgress, SweepStatus, duration
from fedglimpse.studies.sweep.runner import cell_filter
from fedglimpse.studies.sweep.stop import Stop
from mistakes import mistake, mistake_naming
from rewriting import rewrite


def hold(folder: Path, ready: Any) -> None:
    with locked(folder, "sweep"):
        ready.set()
        signal.pause()


@pytest.fixture
def owner(tmp_path: Path) -> Any:
    """A process that holds the lock of `tmp_path`."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path, ready))
    process.start()
    assert ready.wait(20)
    yield process
    process.kill()
    process.join(20)


def test_a_living_owner_keeps_the_lock(owner: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"process {owner.pid}"), locked(tmp_path, "sweep"):
        pass


def test_a_killed_owner_and_a_copied_folder_do_not(owner: Any, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "sweep.lock").write_text((tmp_path / "sweep.lock").read_text())
    with locked(copy, "sweep"):
        assert json.loads((copy / "sweep.lock").read_text())["pid"] == os.getpid()
    owner.kill()
    owner.join(20)
    assert (tmp_path / "sweep.lock").exists()
    with locked(tmp_path, "sweep"):
        pass
    assert not (tmp_path / "sweep.lock").exists()


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return read_plan(write(tmp_path))


def opened(path: Path, plan: Plan) -> SweepFolder:
    folder = SweepFolder(path)
    folder.check(plan)
    path.mkdir(exist_ok=True)
    folder.open(plan, [])
    return folder


def test_the_plan_is_what_the_report_reads(plan: Plan, tmp_path: Path) -> None:
    opened(tmp_path / "o", plan)
    plan = json.loads((tmp_path / "o" / "sweep.json").read_text())
    assert set(plan) == {
        "format", "version", "title", "claim", "control", "targets", "paper", "cells",
        "packs",
    }  # fmt: skip
    assert plan["cells"][0] == {
        "id": "digits-mobile--fedavg--s0",
        "setting": "digits, mobile",
        "variant": "fedavg",
        "seed": 0,
        "overrides": {
            "seeds": [0], "rounds": 8, "checkpoint.every": 3, "agent.learn_start": 2,
            "agent.n_step": 1, "agent.updates_per_round": 1, "visibility.kind": "mobile",
            "method": "fedavg",
        },
    }  # fmt: skip


def changed(path: Path, **values: Any) -> None:
    plan = json.loads((path / "sweep.json").read_text())
    rewrite(path / "sweep.json", json.dumps({**plan, **values}))


def flipped(path: Path) -> None:
    path.write_text(path.read_text().replace('"title"', '"tivle"'))


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "version": (lambda p: changed(p, version="0.0.1"), "version 0.0.1"),
    "format": (lambda p: changed(p, format=99), "format 99"),
    "fewer cells": (lambda p: changed(p, cells=[]), "new cell digits-mobile--fedavg--s0"),
    "a flipped bit": (lambda p: flipped(p / "sweep.json"), "sweep.json is damaged"),
    "no list of cells": (lambda p: changed(p, cells=3), "does not list cells"),
    "a run": (lambda p: (p / "sweep.json").rename(p / "config.toml"), "holds other files"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_folders_are_refused_and_left_alone(name: str, plan: Plan, tmp_path: Path) -> None:
    spoil, part = OTHERS[name]
    path = tmp_path / "o"
    opened(path, plan)
    spoil(path)
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=part):
        SweepFolder(path).check(plan)
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("content", [None, "", '{"cells": ['])
def test_a_plan_that_was_lost_is_written_again(
    content: str | None, plan: Plan, tmp_path: Path
) -> None:
    folder = opened(tmp_path / "o", plan)
    whole = folder.plan.read_bytes()
    folder.of(plan.cells[0]).mkdir()
    if content is None:
        folder.plan.unlink()
    else:
        folder.plan.write_text(content)
    folder.check(plan)
    folder.open(plan, [])
    assert folder.plan.read_bytes() == whole
    folder.plan.unlink()
    (tmp_path / "o" / "cells" / "another").mkdir()
    with mistake("--out"):
        folder.check(plan)


def test_a_finished_cell_with_lost_or_damaged_files_is_not_done(plan: Plan, tmp_path: Path) -> None:
    folder = opened(tmp_path / "o", plan)
    path = folder.of(plan.cells[0])
    path.mkdir()
    store.commit(path, {"config.toml": b"x = 1", "rounds.jsonl": b"{}\n", "summary.json": b"{}"})
    assert folder.state(plan.cells[0]) == "done"
    folder.check_finished(plan.cells)
    for name in ("config.toml", "rounds.jsonl", "summary.json"):
        content = (path / name).read_bytes()
        (path / name).write_bytes(b"")
        with mistake_naming(f"{name} is damaged"):
            folder.check_finished(plan.cells)
        (path / name).write_bytes(content)
    (path / "rounds.jsonl").unlink()
    with mistake_naming("its records are missing"):
        folder.check_finished(plan.cells)


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("rounds = 8", "rounds = 9", "rounds=8, now 9"),
        ("seeds = [0, 1]", "seeds = [0]", "no longer has its cell"),
        ("[base]", "[base]\nlocal.lr = 0.3", "local.lr=None, now 0.3"),
    ],
)
def test_a_changed_file_is_refused(
    old: str, new: str, part: str, plan: Plan, tmp_path: Path
) -> None:
    opened(tmp_path / "o", plan)
    with pytest.raises(UserError, match="holds another sweep") as caught:
        SweepFolder(tmp_path / "o").check(read_plan(write(tmp_path, SMALL.replace(old, new))))
    assert part in str(caught.value)


def test_words_about_the_sweep_may_change(plan: Plan, tmp_path: Path) -> None:
    opened(tmp_path / "o", plan)
    opened(tmp_path / "o", read_plan(write(tmp_path, SMALL.replace("it runs", "it flies"))))
    assert "it flies" in (tmp_path / "o" / "sweep.json").read_text()


def test_a_finished_cell_is_packed_once_and_may_be_cut_anywhere(plan: Plan, tmp_path: Path) -> None:
    folder, cell = opened(tmp_path / "o", plan), plan.cells[0]
    path = folder.of(cell)
    path.mkdir()
    (path / "rounds.jsonl").write_text('{"round":0}\n')
    assert (folder.state(cell), folder.rounds_run(cell)) == ("new", 1)
    (path / "checkpoint.pt").write_text("x")
    assert folder.state(cell) == "begun"
    (path / "summary.json").write_text("{}")
    (path / "rounds.jsonl.gz").write_text("cut short")
    folder.open(plan, [])
    folder.tidy(cell)
    names = sorted(p.name for p in path.iterdir())
    assert names == ["manifest.json", "rounds.jsonl.gz", "summary.json"]
    assert folder.state(cell) == "done"


def test_failures_are_kept_until_forgiven(plan: Plan, tmp_path: Path) -> None:
    folder, cell = opened(tmp_path / "o", plan), plan.cells[0]
    folder.fail(cell, "no luck")
    assert (folder.state(cell), folder.reason(cell)) == ("failed", "no luck")
    assert cell not in folder.left(plan.cells)
    folder.forgive(cell)
    assert folder.state(cell) == "new"


def test_packs_hold_cells_that_can_share_a_world_first_seeds_first(tmp_path: Path) -> None:
    other = SMALL.replace('visibility.kind = "random"', "local.lr = 0.3")
    plan = read_plan(write(tmp_path, other.replace("[0, 1]", "[0, 1, 2]")))
    configs = {c.id: c.config({}) for c in plan.cells}
    packs = make_packs(plan.cells, configs, 4)
    assert [len(p) for p in packs] == [3, 3, 3, 3]
    assert [(c.variant, c.seed) for c in packs[0]] == [("fedavg", 0), ("glimpse", 0), ("fedavg", 1)]
    for pack in packs:
        assert len({configs[c.id].local.lr for c in pack}) == 1
    assert sorted(c.id for p in packs for c in p) == sorted(configs)


def test_packs_that_were_begun_come_first_and_stay_whole(plan: Plan) -> None:
    configs = {c.id: c.config({}) for c in plan.cells}
    packs = make_packs(plan.cells, configs, 2)
    begun = packs[2][1]
    assert begun_first(packs, lambda c: c == begun) == [packs[2], packs[0], packs[1], packs[3]]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ([], 8),
        (["seed=1"], 4),
        (["seed=0", "seed=1"], 8),
        (["seed=1", "variant=fedavg"], 2),
        (["setting=*MOBILE"], 4),
        (["visibility.kind=random", "method=glimpse", "seed=0"], 1),
        (["seed=9"], 0),
    ],
)
def test_only_picks_cells(words: list[str], count: int, plan: Plan) -> None:
    fits = cell_filter(words)
    assert sum(fits(c, c.config({})) for c in plan.cells) == count


@pytest.mark.parametrize("word", ["seed", "sed=1", "=1"])
def test_only_says_what_it_does_not_know(word: str) -> None:
    with pytest.raises(UserError, match="--only"):
        cell_filter([word])


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_keeps_back_a_round_and_its_checkpoints() -> None:
    clock = Clock()
    stop = Stop(20, clock)
    assert stop.may_begin()
    clock.now += 6  # the first round also builds the world
    assert not stop.after_round()
    clock.now += 3
    assert not stop.after_round()  # 11 s left, 2 * 3 + 1 kept
    clock.now += 3
    assert not stop.after_round()  # 8 s left
    clock.now += 3
    assert stop.after_round()
    assert stop.seconds_left == 5
    assert not stop.may_begin()  # a pack took 6 s to its first round


def test_without_a_budget_only_a_signal_stops() -> None:
    clock = Clock()
    stop = Stop(None, clock)
    clock.now += 1e9
    assert stop.may_begin()
    assert not stop.after_round()
    stop.asked = True
    assert stop.after_round()
    assert not stop.may_begin()


def test_a_budget_that_fits_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"--budget 0\.5"):
        Stop(0.5)


def test_the_status_estimates_the_end_by_group() -> None:
    work = {"a": CellWork("x", 10, 0), "b": CellWork("x", 10, 5), "c": CellWork("y", 100, 0)}
    status = SweepStatus(work, done=2, failed=1)
    assert status.seconds_left() is None
    status.run(["a", "b"])
    status.measured("x", rounds=4, seconds=8.0)
    assert status.seconds_left() == 2.0 * (15 - 4) + 2.0 * 100  # y is taken to be as fast as x
    status.settle("b", "done")
    status.settle("a", "begun", rounds_run=2)
    status.run(["c"])
    status.measured("y", rounds=10, seconds=1.0)
    assert status.seconds_left() == pytest.approx(2.0 * 8 + 0.1 * 90)
    assert status.text() == "cells: 3 done, 1 running, 1 left, 1 failed, 25 s to go"


def test_progress_counts_the_rounds_of_a_pack(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    status = SweepStatus({"a": CellWork("x", 4, 0), "b": CellWork("x", 4, 0)}, 0, 0)
    with SweepProgress(status, quiet=False, clock=clock) as progress:
        progress.run(["a", "b"])
        progress.begin("2 runs", 0, 4)
        clock.now += 10
        progress.round([{"round": 0}, {"round": 0}])
        assert status.seconds_left() == 30
        for cell in ("a", "b"):
            status.settle(cell, "done")
    assert capsys.readouterr().err.splitlines() == [
        "cells: 0 done, 2 running, 0 left",
        "cells: 0 done, 2 running, 0 left, round 1 of 4, 30 s to go",
        "cells: 2 done, 0 running, 0 left, round 1 of 4, 0 s to go",
    ]


def test_times_are_spelt_for_people() -> None:
    assert [duration(s) for s in (5, 300, 7200)] == ["5 s", "5 min", "2.0 h"]
