"""Run folders side by side: every run is shown, by a name that tells it from the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from made_up import records_of, write_run

from fedglimpse.errors import UserError
from fedglimpse.studies.report.analysis import analyse
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.stored import write_study

WORDS = {"data.name": "digits", "data.partition": "label_skew", "rounds": 20}
SETTING = "digits label skew mobile"


def run(folder: Path, method: str, seeds: list[int], top: float = 0.8, **more: Any) -> None:
    words = {**WORDS, **{k.replace("__", "."): v for k, v in more.items()}}
    rounds, clients = int(str(words["rounds"])), int(str(words.get("data.clients", 40)))
    records = [r for s in seeds for r in records_of(s, rounds, clients, top, pace=0.3)]
    write_run(folder, {**words, "method": method, "seeds": seeds}, records)


def names(path: Path) -> list[tuple[str, str, int]]:
    return [(c.setting, c.variant, c.seed) for c in load_study(path).cells]


def test_runs_of_one_method_are_told_apart_and_none_is_lost(tmp_path: Path) -> None:
    run(tmp_path / "a", "fedavg", [0, 1], 0.8)
    run(tmp_path / "b", "fedavg", [0, 1], 0.2, local__lr=0.0001)
    run(tmp_path / "g", "glimpse", [0, 1], 0.8)
    study = load_study(tmp_path)
    assert study.settings == [SETTING]
    assert study.variants == ["fedavg (local.lr=0.05)", "fedavg (local.lr=0.0001)", "glimpse"]
    rows = {row.variant: row for row in analyse(study).rows}
    good, bad = (rows[v].spread for v in study.variants[:2])
    assert good is not None
    assert bad is not None
    assert (good.mean > 0.6, bad.mean < 0.4, good.seeds) == (True, True, 2)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"selection__k": 3}, "selection.k=3"),
        ({"rounds": 25}, "rounds=25"),
        ({"data__clients": 50}, "data.clients=50"),
        ({"visibility__cluster_size": 8}, "visibility.cluster_size=8"),
        ({"model__norm": "group"}, "model.norm=group"),
    ],
)
def test_settings_are_told_apart(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    run(tmp_path / "a", "fedavg", [0])
    run(tmp_path / "b", "fedavg", [0], **more)
    run(tmp_path / "c", "glimpse", [0])
    first, second, third = names(tmp_path)
    assert second == (f"{SETTING} ({said})", "fedavg", 0)
    assert first[0] == third[0] != second[0]


def test_seeds_of_one_run_in_several_folders_stay_together(tmp_path: Path) -> None:
    run(tmp_path / "a", "fedavg", [0, 1])
    run(tmp_path / "b", "fedavg", [7], checkpoint__every=3)  # no result depends on that
    assert names(tmp_path) == [(SETTING, "fedavg", seed) for seed in (0, 1, 7)]


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "a", "fedavg", [0, 1])
    run(tmp_path / "copy", "fedavg", [1, 2])
    with pytest.raises(UserError, match=r"a and .*copy hold the same run \(fedavg, seed 1.*move"):
        load_study(tmp_path)


def test_many_differences_are_called_by_the_folder(tmp_path: Path) -> None:
    more = {"local__lr": 0.1, "local__epochs": 1, "local__momentum": 0.5, "local__batch_size": 8}
    run(tmp_path / "plain", "fedavg", [0])
    run(tmp_path / "strong", "fedavg", [0], **more)
    run(tmp_path / "strong-more-seeds", "fedavg", [1], **more)
    variants = [variant for _, variant, _ in names(tmp_path)]
    assert variants == ["fedavg (plain)", "fedavg (strong)", "fedavg (strong)"]


def test_values_that_read_alike_are_called_by_the_folder(tmp_path: Path) -> None:
    run(tmp_path / "a", "fedavg", [0], options__x=True)
    run(tmp_path / "b", "fedavg", [0], options__x="true")
    assert [variant for _, variant, _ in names(tmp_path)] == ["fedavg (a)", "fedavg (b)"]
    run(tmp_path / "c", "fedprox", [0], options__x=3)
    run(tmp_path / "d", "fedprox", [0])
    assert [variant for _, variant, _ in names(tmp_path)][2:] == [
        "fedprox (options.x=3)",
        "fedprox (options.x=not set)",
    ]


def test_another_learning_rate_for_other_data_is_no_other_variant(tmp_path: Path) -> None:
    run(tmp_path / "a", "fedavg", [0])
    run(tmp_path / "b", "fedavg", [0], data__name="synthetic", local__lr=0.5)
    assert [variant for _, variant, _ in names(tmp_path)] == ["fedavg", "fedavg"]


def test_parts_with_different_runs_by_one_name_are_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", "fedavg", [0])
    study = load_study(tmp_path / "run")
    other = [dataclasses.replace(c, config={**c.config, "local.lr": 0.5}) for c in study.cells]
    (tmp_path / "parts").mkdir()
    write_study(study, tmp_path / "parts" / "study-a.json.gz")
    write_study(dataclasses.replace(study, cells=other), tmp_path / "parts" / "study-b.json.gz")
    with pytest.raises(UserError, match=r"different runs of setting .*'fedavg', seed 0"):
        load_study(tmp_path / "parts")
