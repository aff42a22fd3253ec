"""Accuracy on the data of clients that came late."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from command_line import fedglimpse
from fedglimpse.runs.experiment import run
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.stored import read_study, write_study

CHURN = {
    "data.name": "digits",
    "data.clients": 20,
    "method": "fedavg",
    "selection.k": 2,
    "rounds": 12,
    "seeds": [0, 1],
    "visibility.kind": "churn",
    "visibility.present": 6,
    "visibility.lifetime": 10,
    "visibility.p": 0.7,
}


def test_the_last_model_is_scored_on_the_data_of_late_comers() -> None:
    result = run(CHURN)
    world = result.world
    for r, lane in enumerate(world.lanes):
        entry = result.summary["latecomers"][str(lane.seed)]
        first_round = lane.visibility.arrivals(lane.seed)
        groups = {
            "accuracy": [i for i in range(20) if 0 < first_round[i] < 12],
            "accuracy_of_first": [i for i in range(20) if first_round[i] == 0],
        }
        assert entry["clients"] == len(groups["accuracy"]) > 0
        for name, clients in groups.items():
            rows = torch.cat([lane.population.rows[client] for client in clients])
            x, y = world.dataset.x_train[rows], world.dataset.y_train[rows]
            score = world.evaluator.score(world.states[r], x, y)
            assert abs(entry[name] - score.accuracy) < 1e-6


def test_where_nobody_comes_late_nothing_is_said() -> None:
    stays = {**CHURN, "rounds": 2, "visibility.lifetime": 1e6}
    assert "latecomers" not in run(stays).summary
    assert "latecomers" not in run({**CHURN, "rounds": 2, "visibility.kind": "random"}).summary


def test_clients_that_draw_their_rows_count_each_of_them() -> None:
    result = run({**CHURN, "data.samples": 30, "seeds": [0]})
    lane = result.world.lanes[0]
    first_round = lane.visibility.arrivals(0)
    late = [i for i in range(20) if 0 < first_round[i] < 12]
    rows = torch.cat([lane.population.rows[client] for client in late])
    x, y = result.world.dataset.x_train[rows], result.world.dataset.y_train[rows]
    expected = result.world.evaluator.score(result.world.states[0], x, y).accuracy
    assert abs(result.summary["latecomers"]["0"]["accuracy"] - expected) < 1e-6


def test_a_report_shows_them(tmp_path: Path) -> None:
    summary = run(CHURN, tmp_path / "r").summary["latecomers"]
    study = load_study(tmp_path / "r")
    assert {str(cell.seed): cell.latecomers for cell in study.cells} == summary
    write_study(study, tmp_path / "study.json.gz")
    again = read_study(tmp_path / "study.json.gz")
    assert [cell.latecomers for cell in again.cells] == [cell.latecomers for cell in study.cells]
    printed = fedglimpse("report", str(tmp_path / "r"), "--out", str(tmp_path / "out"))
    assert "late-comers: digits dirichlet churn, fedavg" in " ".join(printed.stdout.split())
    assert "Late-comers" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    header, line = (tmp_path / "out" / "seeds.csv").read_text(encoding="utf-8").splitlines()[:2]
    values = dict(zip(header.split(","), line.split(","), strict=False))
    assert float(values["accuracy_on_latecomers"]) == summary["0"]["accuracy"]
    stored = json.loads((tmp_path / "r" / "summary.json").read_text(encoding="utf-8"))
    assert stored["latecomers"] == summary
