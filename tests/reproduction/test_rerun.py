"""Runs that were played again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from played import Came, played

from fedglimpse.study import Cell, Study
from fedglimpse.study.store import write_study
from reproduction.rerun import rerun

ACCURACY = (0.80, 0.81, 0.79, 0.80, 0.80)  # t s = 2.0 points


def stored() -> Study:
    def one_setting(cell: Cell, config: object) -> Came | None:
        return Came(ACCURACY[cell.seed]) if cell.setting == "HAPT (recomputed), MS" else None

    return played("table1", one_setting)


def again(tmp_path: Path, found: dict[str, float]) -> Path:
    def seed_one(cell: Cell, config: object) -> Came | None:
        here = cell.setting == "HAPT (recomputed), MS" and cell.seed == 1
        return Came(found[cell.variant]) if here and cell.variant in found else None

    write_study(played("table1", seed_one), tmp_path / "study.json.gz")
    return tmp_path


def test_nothing_is_said_without_runs(tmp_path: Path) -> None:
    assert rerun(stored(), tmp_path) == "Not run yet."
    assert rerun(stored(), again(tmp_path, {})) == "Not run yet."


def test_a_run_is_compared_with_the_same_seed(tmp_path: Path) -> None:
    text = rerun(stored(), again(tmp_path, {"fedavg": 0.795, "glimpse": 0.77, "dpp": 0.85}))
    near = "| HAPT (recomputed), MS | fedavg | 1 | 81.0 | 79.5 | −1.5 | 2.0 | reproduced |"
    assert near in text
    assert "| glimpse | 1 | 81.0 | 77.0 | −4.0 | 2.0 | not reproduced |" in text
    assert "| dpp | 1 | 81.0 | 85.0 | +4.0 | 2.0 | not reproduced |" in text
    assert "1 of 3 reproduced. All of them, again minus stored: −0.5 [" in text


def test_one_stored_seed_says_nothing_of_the_spread(tmp_path: Path) -> None:
    study = stored()
    few = [c for c in study.cells if c.seed == 1]
    text = rerun(dataclasses.replace(study, cells=few), again(tmp_path, {"fedavg": 0.8}))
    assert "| 81.0 | 80.0 | −1.0 | – | one seed stored |" in text
