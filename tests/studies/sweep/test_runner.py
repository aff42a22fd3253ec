"""A whole sweep in this process: what is stored, failures, stops, reuse."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from sweeps import SMALL, results, write
from typer.testing import CliRunner

from fedglimpse.cli.sweep import sweep
from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.errors import DeviceLost, UserError
from fedglimpse.runs import experiment
from fedglimpse.runs import folder as records
from fedglimpse.runs.folder import run_identity
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.stored import write_study
from fedglimpse.studies.sweep import local, runner
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.plan import Plan, read_plan
from fedglimpse.studies.sweep.progress import SweepProgress, SweepStatus
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep
from fedglimpse.studies.sweep.stop import Stop
from fedglimpse.types import Choice, Method, View

QUIET = SweepOptions(quiet=True)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return read_plan(write(tmp_path_factory.mktemp("plan")))


@pytest.fixture(scope="module")
def whole(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed sweep."""
    out = tmp_path_factory.mktemp("whole") / "o"
    ended = run_sweep(plan, out, QUIET)
    assert (ended.done, ended.left, ended.failed, ended.interrupted) == (8, 0, {}, False)
    return out


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The packs that were played, as folder names."""
    seen: list[list[str]] = []

    def spy(runs: Sequence[tuple[Config, Path]], **words: Any) -> Any:
        seen.append([path.name for _, path in runs])
        return experiment.run_together(runs, **words)

    monkeypatch.setattr(local, "run_together", spy)
    return seen


def test_cells_are_run_folders_of_one_seed(whole: Path, plan: Plan) -> None:
    found = results(whole)
    assert sorted(found) == sorted(c.id for c in plan.cells)
    for summary, rounds, _ in found.values():
        assert len(rounds) == 8
        assert len(summary["seeds"]) == 1
    assert sorted(p.name for p in whole.iterdir()) == ["cells", "manifest.json", "sweep.json"]
    names = {p.name for cell in (whole / "cells").iterdir() for p in cell.iterdir()}
    assert names == {
        "config.toml", "environment.json", "manifest.json", "rounds.jsonl.gz", "summary.json",
    }  # fmt: skip


def test_a_cell_equals_the_run_of_its_overrides(whole: Path, plan: Plan) -> None:
    cell = plan.cells[3]
    alone = experiment.run(dict(cell.overrides))
    packed = results(whole)[cell.id][1]
    assert [r["selected"] for r in packed] == [r["selected"] for r in alone.records]
    assert [r["accuracy"] for r in packed] == pytest.approx(
        [r["accuracy"] for r in alone.records], abs=0.01
    )


def test_nothing_is_computed_twice(whole: Path, plan: Plan, packs: list[list[str]]) -> None:
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()}
    assert run_sweep(plan, whole, QUIET).done == 8
    assert packs == []
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()} == before


def test_only_leaves_the_rest_for_later(
    whole: Path, plan: Plan, packs: list[list[str]], tmp_path: Path
) -> None:
    ended = run_sweep(plan, tmp_path / "o", SweepOptions(only=["seed=1"], quiet=True))
    assert (ended.done, ended.left) == (4, 0)
    assert packs == [[c.id for c in plan.cells if c.seed == 1]]
    assert len(json.loads((tmp_path / "o" / "sweep.json").read_text())["cells"]) == 8
    assert run_sweep(plan, tmp_path / "o", QUIET).done == 8
    assert results(tmp_path / "o") == results(whole)


def test_stopped_between_rounds_it_goes_on_with_its_checkpoints(
    whole: Path, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def five_rounds(stop: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls % 5 == 0

    monkeypatch.setattr("fedglimpse.studies.sweep.stop.Stop.after_round", five_rounds)
    ended = run_sweep(plan, tmp_path / "o", QUIET)
    assert (ended.done, ended.left) == (0, 8)
    begun = sorted((tmp_path / "o" / "cells").iterdir())
    assert [(c / "rounds.jsonl").read_text().count("\n") for c in begun] == [5] * 4
    shutil.move(tmp_path / "o", tmp_path / "elsewhere")
    for _ in range(4):
        ended = run_sweep(plan, tmp_path / "elsewhere", QUIET)
    assert (ended.done, ended.left) == (8, 0)
    assert calls == 16  # two packs of 8 rounds: not one was played twice
    assert results(tmp_path / "elsewhere") == results(whole)


class Fragile:
    """Chooses the first client, and breaks in round 4 of seed 1."""

    needs: frozenset[str] = frozenset()
    learns_from: frozenset[str] = frozenset()

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def select(self, view: View, k: int) -> Choice:
        import torch

        if self.seed == 1 and view.round_num == 4:
            raise ZeroDivisionError("no client to divide by")
        return Choice(torch.tensor([0]))

    def feedback(self, outcome: Any) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def fragile(setting: Any) -> Method:
    return Method(Fragile(setting.seed), setting.temporal_window())


def test_only_the_guilty_cell_fails(
    whole: Path, tmp_path: Path, packs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    text = SMALL.replace('"glimpse"]', '"test_runner:fragile"]')
    plan = read_plan(write(tmp_path, text))
    ended = run_sweep(plan, tmp_path / "o", QUIET)
    assert (ended.done, ended.left) == (6, 0)
    assert sorted(ended.failed) == [
        "digits-mobile--test-runner-fragile--s1",
        "digits-random--test-runner-fragile--s1",
    ]
    reason = next(iter(ended.failed.values()))
    assert reason.startswith("ZeroDivisionError: no client to divide by (test_runner.py:")
    assert len(packs[0]) == 4
    mine = {k: v for k, v in results_of_done(tmp_path / "o").items() if "--fedavg--" in k}
    assert mine == {k: v for k, v in results(whole).items() if "--fedavg--" in k}
    packs.clear()
    assert run_sweep(plan, tmp_path / "o", QUIET).failed == ended.failed
    assert packs == []
    monkeypatch.setattr(Fragile, "select", lambda self, view, k: Choice(view.ids[:1] * 0))
    again = run_sweep(plan, tmp_path / "o", SweepOptions(retry_failed=True, quiet=True))
    assert (again.done, again.failed) == (8, {})


def results_of_done(out: Path) -> dict[str, Any]:
    copy = out.with_name("done")
    for summary in (out / "cells").glob("*/summary.json"):
        shutil.copytree(summary.parent, copy / "cells" / summary.parent.name)
    return results(copy)


def test_a_full_disk_ends_the_sweep_and_blames_no_cell(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append: Callable[..., None] = records.RunFolder.append
    calls = 0

    def full(self: Any, new: Any) -> None:
        nonlocal calls
        calls += 1
        with records.writing(self.path):
            if calls == 10:
                raise OSError(errno.ENOSPC, "full")
        append(self, new)

    with monkeypatch.context() as patch:
        patch.setattr(records.RunFolder, "append", full)
        with pytest.raises(UserError, match="No space left"):
            run_sweep(plan, tmp_path / "o", QUIET)
    assert list((tmp_path / "o").rglob("failed.json")) == []
    assert run_sweep(plan, tmp_path / "o", QUIET).done == 8


def test_what_cannot_fit_is_refused_before_anything_is_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(runner.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="needs about 128 MB"):
        run_sweep(plan, tmp_path / "o", QUIET)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (SweepOptions(only=["seed=9"]), "leaves no cell"),
        (SweepOptions(extra={"rounds": 5}), "--set rounds"),
        (SweepOptions(extra={"engine.precision": "bf16", "engine.device": "cpu"}), "bf16"),
        (SweepOptions(extra={"engine.trainer": "foo"}), "--set: engine.trainer=foo"),
        (
            SweepOptions(extra={"engine.trainer": "graphed", "engine.device": "cpu"}),
            "engine.trainer=graphed",
        ),
        (SweepOptions(extra={"engine.max_jobs": 0}), "--set: engine.max_jobs=0"),
        (SweepOptions(extra={"checkpoint.every": 0}), "--set: checkpoint.every=0"),
        (SweepOptions(extra={"log.own": "nope:x"}), "log.own=nope:x"),
        (SweepOptions(budget=0.1), "--budget 0.1"),
        (SweepOptions(budget=float("nan")), "--budget nan"),
        (SweepOptions(reuse=[Path("/nowhere")]), "--reuse /nowhere"),
    ],
)
def test_what_cannot_be_run_is_refused_too(
    options: SweepOptions, part: str, plan: Plan, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=part):
        run_sweep(plan, tmp_path / "o", options)
    assert not (tmp_path / "o").exists()


def test_finished_cells_of_another_sweep_are_taken_over(
    whole: Path, tmp_path: Path, packs: list[list[str]]
) -> None:
    text = SMALL.replace("digits, mobile", "the same by another name").replace(
        '"glimpse"]', '"fedprox"]'
    )
    plan = read_plan(write(tmp_path, text))
    ended = run_sweep(plan, tmp_path / "o", SweepOptions(reuse=[whole], quiet=True))
    assert (ended.reused, ended.done) == (4, 8)
    assert sorted(name for pack in packs for name in pack) == sorted(
        c.id for c in plan.cells if c.variant == "fedprox"
    )
    found, theirs = results(tmp_path / "o"), results(whole)
    taken = found["the-same-by-another-name--fedavg--s1"]
    assert taken == theirs["digits-mobile--fedavg--s1"]


@pytest.mark.parametrize("stored", [True, False], ids=["study file", "sweep folder"])
def test_runs_that_a_study_has_are_left_out(
    stored: bool, whole: Path, tmp_path: Path, packs: list[list[str]]
) -> None:
    source = whole
    if stored:
        source = tmp_path / "study.json.gz"
        write_study(load_study(whole), source)
    text = SMALL.replace("digits, mobile", "another name").replace('"glimpse"]', '"fedprox"]')
    plan = read_plan(write(tmp_path, text))
    ended = run_sweep(plan, tmp_path / "o", SweepOptions(without=[source], quiet=True))
    assert (ended.left_out, ended.done, ended.left) == (4, 4, 0)
    assert {name.split("--")[1] for pack in packs for name in pack} == {"fedprox"}
    same = read_plan(write(tmp_path, SMALL))
    ended = run_sweep(same, tmp_path / "nothing", SweepOptions(without=[source], quiet=True))
    assert (ended.left_out, ended.done, ended.left) == (8, 0, 0)
    assert not (tmp_path / "nothing").exists()


def test_a_run_stored_before_a_key_was_there_has_its_default() -> None:
    config = Config().flat()
    older = {k: v for k, v in config.items() if k != "agent.reward"}
    assert run_identity(older) == run_identity(config | {"engine.precision": "bf16"})
    assert run_identity(older) != run_identity(config | {"agent.reward": "change"})


def test_a_preset_that_only_stands_for_values_is_not_part_of_a_run() -> None:
    config = resolve({"preset": "tuned-1"}).flat()
    assert run_identity(config | {"preset": "tuned"}) == run_identity(config)  # its older name
    assert run_identity(resolve({"preset": "tuned"}).flat()) != run_identity(config)
    assert run_identity(config | {"preset": "released"}) != run_identity(config)  # f3ast asks


def test_other_packs_give_nearly_the_same_figures(whole: Path, plan: Plan, tmp_path: Path) -> None:
    run_sweep(plan, tmp_path / "o", SweepOptions(lanes=3, quiet=True))
    mine, theirs = results(tmp_path / "o"), results(whole)
    for cell, (_, rounds, config) in mine.items():
        assert config == theirs[cell][2]
        for a, b in zip(rounds, theirs[cell][1], strict=True):
            assert (a["visible"], a["selected"]) == (b["visible"], b["selected"])
            assert a["accuracy"] == pytest.approx(b["accuracy"], abs=0.01)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["no_such.toml"], "no_such.toml"),
        (["FILE", "--lanes", "many"], "--lanes many"),
        (["FILE", "--lanes", "0"], "--lanes 0"),
        (["FILE", "--lanes", "²"], "--lanes ²"),
        (["FILE", "--budget", "nan"], "--budget nan"),
        (["FILE", "--engine", "slurm"], "--engine slurm"),
        (["FILE", "--only", "sede=1"], "Did you mean 'seed'"),
        (["FILE", "--set", "rounds=3"], "--set rounds"),
        (["FILE", "--without", "no_such_study"], "no_such_study holds no results"),
    ],
)
def test_mistakes_on_the_command_line_write_nothing(
    words: list[str], part: str, tmp_path: Path
) -> None:
    app, file, out = typer.Typer(), write(tmp_path), tmp_path / "o"
    app.command()(sweep)
    words = [str(file) if w == "FILE" else w for w in words]
    done = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert isinstance(done.exception, UserError), done.output
    assert part in str(done.exception)
    assert not out.exists()


def test_a_gpu_that_stopped_ends_the_sweep_and_blames_no_cell(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, whatever advice CUDA has, and while the error still holds what lies there."""
    lost = RuntimeError("CUDA error: an illegal instruction\nSearch for it.\nCompile with DSA.")

    def broken(*_: Any, **__: Any) -> Any:
        raise lost

    monkeypatch.setattr(local, "run_together", broken)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.zeros", broken)
    with pytest.raises(DeviceLost) as caught:
        local.run_packs(
            SweepFolder(tmp_path),
            [plan.cells],
            {c.id: Config() for c in plan.cells},
            Stop(None),
            SweepProgress(SweepStatus({}, 0, 0), quiet=True),
        )
    assert "\n" not in str(caught.value)
    assert "an illegal instruction (test_runner.py" in str(caught.value)
    assert caught.value.__context__ is lost
    assert not list(tmp_path.rglob("failed.json"))


def test_a_gpu_whose_memory_is_full_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.zeros", full)
    local.check_device("CUDA out of memory.")
