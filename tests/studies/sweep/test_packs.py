"""Packs are fixed when a sweep is first run, and shards are parts of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sweeps import SMALL, results, write

from fedglimpse.errors import UserError
from fedglimpse.storage.lock import locked
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.study import join_studies
from fedglimpse.studies.sweep import packs
from fedglimpse.studies.sweep.packs import fixed_packs, make_packs, most_on_cpu
from fedglimpse.studies.sweep.plan import Plan, configs_of, read_plan
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep
from fedglimpse.studies.sweep.shard import Shard, read_shard
from mistakes import mistake
from rewriting import rewrite

SHORT = SMALL.replace("rounds = 8", "rounds = 2")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return read_plan(write(tmp_path, SHORT))


def stored_packs(out: Path) -> list[list[str]]:
    return json.loads((out / "sweep.json").read_text())["packs"]


@pytest.mark.parametrize(
    ("cells", "cores", "shards", "most"),
    [(16, 2, 1, 4), (8, 2, 1, 4), (8, 2, 2, 2), (8, 4, 1, 2), (8, 64, 1, 1), (800, 64, 3, 4)],
)
def test_there_is_a_pack_for_every_core(
    cells: int, cores: int, shards: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "available_cores", lambda: cores)
    assert most_on_cpu(cells, shards) == most


def test_convolutions_train_alone_on_a_cpu(tmp_path: Path) -> None:
    text = SHORT.replace("[base]", '[base]\ndata.name = "fashion"')
    plan = read_plan(write(tmp_path, text))
    made = make_packs(plan.cells, configs_of(plan.cells, {"engine.device": "cpu"}), None)
    assert [len(pack) for pack in made] == [1] * 8


def test_stored_packs_stay_and_only_other_cells_are_packed(plan: Plan) -> None:
    configs = configs_of(plan.cells, {})
    ids = [cell.id for cell in plan.cells]
    stored = [[ids[0], ids[5], "of another time"], [ids[7]]]
    fixed = fixed_packs(stored, plan.cells[:7], configs, lanes=3)
    assert [[cell.id for cell in pack] for pack in fixed[:1]] == [[ids[0], ids[5]]]
    assert sorted(len(pack) for pack in fixed[1:]) == [2, 3]


def test_a_resumed_sweep_keeps_its_packs(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "o"
    run_sweep(plan, out, SweepOptions(only=["seed=0"], lanes=2, quiet=True))
    first = stored_packs(out)
    assert [len(pack) for pack in first] == [2, 2]
    run_sweep(plan, out, SweepOptions(lanes=4, quiet=True))
    assert stored_packs(out)[:2] == first
    assert [len(pack) for pack in stored_packs(out)[2:]] == [4]


def test_a_folder_without_packs_is_resumed(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "o"
    run_sweep(plan, out, SweepOptions(only=["seed=0"], lanes=2, quiet=True))
    content = json.loads((out / "sweep.json").read_text())
    del content["packs"]
    rewrite(out / "sweep.json", json.dumps(content))
    outcome = run_sweep(plan, out, SweepOptions(lanes=4, quiet=True))
    assert (outcome.done, outcome.failed) == (8, {})
    assert len(stored_packs(out)) == 2


@pytest.mark.parametrize("text", ["", "1", "3/2", "0/2", "1/0", "a/b", "1/2/3", "-1/2", "²/3"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with mistake("--shard"):
        read_shard(text)


def test_shards_share_out_every_pack(plan: Plan) -> None:
    made = make_packs(plan.cells, configs_of(plan.cells, {}), 1)
    parts = [read_shard(f"{i}/3").packs(made) for i in (1, 2, 3)]
    assert sorted(map(len, parts)) == [2, 3, 3]
    assert sorted(pack[0].id for part in parts for pack in part) == sorted(
        cell.id for cell in plan.cells
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of an undisturbed sweep in packs of two."""
    folder = tmp_path_factory.mktemp("whole")
    run_sweep(read_plan(write(folder, SHORT)), folder / "o", SweepOptions(lanes=2, quiet=True))
    return folder / "o"


def test_shards_in_one_folder_give_the_results_of_one_sweep(
    plan: Plan, whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "o"
    for number in (2, 1):
        options = SweepOptions(lanes=2, shard=Shard(number, 2), quiet=True)
        outcome = run_sweep(plan, out, options)
        assert (outcome.done, outcome.left) == (4, 0)
    assert results(out) == results(whole)
    assert stored_packs(out) == stored_packs(whole)


def test_shards_in_several_folders_are_reported_together(
    plan: Plan, whole: Path, tmp_path: Path
) -> None:
    for number in (1, 2):
        options = SweepOptions(lanes=2, shard=Shard(number, 2), quiet=True)
        run_sweep(plan, tmp_path / "shards" / str(number), options)
    together = load_study(tmp_path / "shards")
    assert together.count("finished") == 8
    alone = load_study(whole)
    for cell, expected in zip(together.cells, alone.cells, strict=True):
        assert cell.name == expected.name
        assert cell.facts is not None
        assert expected.facts is not None
        assert cell.facts.accuracy == expected.facts.accuracy
        assert cell.facts.climb.totals == expected.facts.climb.totals
    both = [load_study(tmp_path / "shards" / str(number)) for number in (1, 2)]
    assert join_studies(both, "both").cells == together.cells
    assert both[0].count("missing") == 4


def test_shards_and_whole_sweeps_keep_out_of_each_others_way(plan: Plan, tmp_path: Path) -> None:
    out = tmp_path / "o"
    first = SweepOptions(lanes=2, shard=Shard(1, 2), quiet=True)
    run_sweep(plan, out, first)
    second = SweepOptions(shard=Shard(2, 2), quiet=True)
    for held, options, is_refused in (
        ("sweep shard 1 of 2", first, True),
        ("sweep shard 1 of 2", SweepOptions(quiet=True), True),
        ("sweep shard 1 of 3", second, True),
        ("sweep", second, True),
        ("sweep shard 1 of 2", second, False),
    ):
        with locked(out, held):
            if is_refused:
                with pytest.raises(UserError, match="in use by another sweep"):
                    run_sweep(plan, out, options)
            else:
                assert run_sweep(plan, out, options).done == 4


def test_a_shard_of_another_plan_is_refused(plan: Plan, tmp_path: Path) -> None:
    run_sweep(plan, tmp_path / "o", SweepOptions(shard=Shard(1, 2), quiet=True))
    other = read_plan(write(tmp_path, SMALL))
    with mistake("--out"):
        run_sweep(other, tmp_path / "o", SweepOptions(shard=Shard(2, 2), quiet=True))
