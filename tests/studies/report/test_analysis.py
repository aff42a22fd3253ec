from __future__ import annotations

import csv
import dataclasses
import io
import shlex
from typing import Any

import pytest
from made_up import records_of, study_of

from fedglimpse.config.loading import load, resolve
from fedglimpse.errors import UserError
from fedglimpse.studies.report.analysis import Options, ReportRow, Results, analyse, command
from fedglimpse.studies.report.numbers import amount, signed
from fedglimpse.studies.report.tables import cells_csv, latex, missing, rows_csv
from fedglimpse.studies.results.study import Study
from fedglimpse.studies.statistics.condense import condense
from fedglimpse.studies.statistics.to_target import Spent

SETTING = {"a_b": {"data.name": "digits"}}


@pytest.fixture(scope="module")
def study() -> Study:
    variants = {"fedavg": 0.60, "fedprox": 0.601, "glimpse": 0.70}
    return study_of(SETTING, variants, [0, 1, 2, 3, 4], 100, 40, control="fedavg")


def row(results: Results, variant: str) -> ReportRow:
    return next(r for r in results.rows if r.variant == variant)


def test_a_clear_difference_is_real_and_a_tiny_one_is_noise(study: Study) -> None:
    results = analyse(study)
    better, same = row(results, "glimpse"), row(results, "fedprox")
    assert better.control is not None
    assert same.control is not None
    assert (better.control.verdict, same.control.verdict) == ("significant", "not significant")
    assert row(results, "fedavg").control is None
    assert (better.best, same.best) == (True, False)
    raw = [better.control.difference.p, same.control.difference.p]
    assert better.control.p == pytest.approx(2 * min(raw))  # two comparisons: Holm


def test_default_target_is_said_to_be_worked_out(study: Study) -> None:
    best = row(analyse(study), "glimpse").spread
    assert best is not None
    target = analyse(study).targets["a_b"]
    assert (target.given, target.value) == (False, pytest.approx(0.9 * best.mean))
    given = analyse(dataclasses.replace(study, targets={"a_b": 0.3})).targets["a_b"]
    assert (given.given, given.value) == (True, 0.3)
    assert analyse(study, Options(target=0.2)).targets["a_b"].value == 0.2


def test_failed_and_unfinished_seeds_count_as_misses(study: Study) -> None:
    cells = list(study.cells)
    short = condense(records_of(1, 10, 40, 0.6), 100)
    cells[0] = dataclasses.replace(cells[0], state="failed", reason="NaN", facts=None)
    cells[1] = dataclasses.replace(cells[1], state="unfinished", facts=short)
    cells[2] = dataclasses.replace(cells[2], state="missing", facts=None)
    results = analyse(dataclasses.replace(study, cells=cells), Options(target=0.3))
    control = row(results, "fedavg")
    assert control.finished == 2
    assert control.spread is not None
    assert control.spread.seeds == 2
    cost = control.to_target["rounds"]
    assert (len(cost.runs), cost.reached) == (4, 2)  # the one that was never begun is left out
    assert Spent(0, False) in cost.runs
    assert Spent(10, False) in cost.runs
    assert row(results, "glimpse").savings["rounds"].bound == "≥"
    compared = row(results, "glimpse").control
    assert compared is not None
    assert compared.difference.pairs == 2
    assert missing(results)[0] == "failed: a_b, fedavg, seed 0 (NaN)"


def test_a_missing_first_seed_does_not_hide_what_was_run(study: Study) -> None:
    cells = [
        dataclasses.replace(c, state="missing", config={}, facts=None) if c.seed == 0 else c
        for c in study.cells
    ]
    settings = {"a": {"match": {"data.name": "digits"}}}
    paper = {"source": "S", "title": "T", "seeds": 5, "settings": settings}
    paper |= {"accuracy": {"a": {"glimpse": [70.0, 1.0]}}}
    results = analyse(dataclasses.replace(study, cells=cells, paper=paper))
    found = row(results, "glimpse")
    assert found.published is not None
    assert found.command.endswith("'seeds=[0,1,2,3,4]'")
    assert found.finished == 4


def test_an_unknown_control_names_the_nearest(study: Study) -> None:
    with pytest.raises(UserError, match="Did you mean 'fedprox'"):
        analyse(study, Options(control="fedprx"))
    assert analyse(dataclasses.replace(study, control=None)).control == "fedavg"


def test_csv_holds_every_row_and_every_seed(study: Study) -> None:
    results = analyse(study, Options(target=0.65))
    rows = list(csv.DictReader(io.StringIO(rows_csv(results))))
    assert [r["variant"] for r in rows] == ["fedavg", "fedprox", "glimpse"]
    assert (rows[0]["rounds_is"], rows[0]["rounds_reached"]) == ("at least", "0")
    assert rows[2]["minus_control_verdict"] == "significant"
    cells = list(csv.DictReader(io.StringIO(cells_csv(results))))
    assert len(cells) == 15
    assert (cells[0]["rounds_to_target"], cells[0]["rounds_at_end"]) == ("", "100")
    assert {c["source"] for c in cells} == {"0f1e"}
    mine = [float(c["accuracy"]) for c in cells if c["variant"] == "glimpse"]
    assert sum(mine) / 5 == pytest.approx(float(rows[2]["accuracy"]))


def test_latex_escapes_and_marks(study: Study) -> None:
    lines = latex(analyse(study)).splitlines()
    line = next(text for text in lines if text.startswith(r"a\_b"))
    assert line.count("&") == 3
    assert line.count(r"\textbf") == 1
    assert line.endswith(r"\(^\dagger\) \\")


@pytest.mark.parametrize(
    "words",
    [
        {"method": "glimpse", "rounds": 7},
        {"preset": "paper", "data.name": "fashion", "method": "fedavg", "agent.history": 8},
        {"data.name": "har", "visibility.p": 0.5, "local.augment": True, "options.x": 2},
        {"method": "my.module:build", "model.name": "12", "options.flag": False},
    ],
)
def test_the_command_repeats_the_configuration(words: dict[str, Any]) -> None:
    config = resolve({**words, "seeds": [3, 5], "engine.trainer": "serial"})
    said = shlex.split(command(config.flat(), [3, 5]))
    assert said[:2] == ["fedglimpse", "run"]
    again = load(None, said[2:])
    assert again.flat() == resolve({**words, "seeds": [3, 5]}).flat()


def test_the_command_names_the_preset_that_is_nearest() -> None:
    then = resolve({"preset": "tuned-1", "method": "glimpse", "agent.history": 3}).flat()
    said = command({**then, "preset": "tuned"}, [0])  # what it meant before
    assert "preset=tuned-1" in said
    assert "agent.history=3" in said
    assert "agent.input" not in said


def test_amounts() -> None:
    assert [amount(v, "B") for v in (0, 999, 1234, 56_789, 345e9)] == [
        "0 B", "999 B", "1.23 kB", "56.8 kB", "345 GB",
    ]  # fmt: skip
    assert amount(12345, "") == "12 345"
    assert signed(-0.0123) == "−1.2"
