"""Runs that were played again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fedglimpse.studies.results.stored import write_study
from fedglimpse.studies.results.study import CellResult, Study
from played import Came, played
from reproduction.rerun import rerun

ACCURACY = (0.80, 0.81, 0.79, 0.80, 0.80)


def stored() -> Study:
    def one_setting(cell: CellResult, config: object) -> Came | None:
        return Came(ACCURACY[cell.seed]) if cell.setting == "HAPT (recomputed), MS" else None

    study = played("table1", one_setting)
    cells = [dataclasses.replace(c, environment={"gpu": "some"}) for c in study.cells]
    return dataclasses.replace(study, cells=cells)


def again(tmp_path: Path, found: dict[str, float]) -> Path:
    def seed_one(cell: CellResult, config: object) -> Came | None:
        here = cell.setting == "HAPT (recomputed), MS" and cell.seed == 1
        return Came(found[cell.variant]) if here and cell.variant in found else None

    write_study(played("table1", seed_one), tmp_path / "study.json.gz")
    return tmp_path


def test_nothing_is_said_without_runs(tmp_path: Path) -> None:
    assert rerun(stored(), tmp_path) == "Not run yet."
    assert rerun(stored(), again(tmp_path, {})) == "Not run yet."


def test_a_run_is_compared_with_the_same_seed(tmp_path: Path) -> None:
    text = rerun(stored(), again(tmp_path, {"fedavg": 0.795, "glimpse": 0.77, "dpp": 0.85}))
    assert "| HAPT (recomputed), MS | fedavg | 1 | 81.0 | 79.5 | −1.5 | 2.0 |" in text
    assert "| glimpse | 1 | 81.0 | 77.0 | −4.0 | 2.0 |" in text
    assert "| dpp | 1 | 81.0 | 85.0 | +4.0 | 2.0 |" in text
    assert "3 runs. Median distance between a run and its repetition: 4.00 points; " in text
    assert (
        "two seeds of one method in one setting: 1.00. Again minus stored, mean: −0.5 points"
        in text
    )


def test_a_run_that_was_stored_from_a_cpu_says_nothing(tmp_path: Path) -> None:
    study = stored()
    here = [dataclasses.replace(c, environment={"gpu": None}) for c in study.cells]
    moved = dataclasses.replace(study, cells=here)
    assert rerun(moved, again(tmp_path, {"fedavg": 0.8})) == "Not run yet."


def test_one_stored_seed_has_no_other_beside_it(tmp_path: Path) -> None:
    study = stored()
    few = [c for c in study.cells if c.seed == 1]
    text = rerun(dataclasses.replace(study, cells=few), again(tmp_path, {"fedavg": 0.8}))
    assert "| 81.0 | 80.0 | −1.0 | – |" in text
    assert "two seeds" not in text
