"""The table of `fedglimpse compare` shows the numbers of the report."""

from __future__ import annotations

from typing import Any

import pytest

import fedglimpse
from fedglimpse.runs.experiment import Result
from fedglimpse.studies.compare import comparison_table
from fedglimpse.studies.report.analysis import Options, analyse
from fedglimpse.studies.report.numbers import t_interval
from fedglimpse.studies.results.load import load_study

SMALL = {"data.name": "digits", "rounds": 6, "seeds": [0, 1], "engine.device": "cpu"}


def columns(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    out = tmp_path_factory.mktemp("compared")
    methods = ("fedavg", "fedavg-window", "power-of-choice")
    return [fedglimpse.run({**SMALL, "method": name}, out / name) for name in methods]


def test_every_line_has_the_numbers_of_the_report(results: list[Result]) -> None:
    lines = comparison_table(results, target=0.3).splitlines()
    assert columns(lines[0])[2] == "minus fedavg-window [95 % interval]"
    assert results[0].path is not None
    report = analyse(load_study(results[0].path.parent), Options(target=0.3))
    assert report.control == "fedavg-window"  # the control wherever it was run
    for line, row in zip(lines[2:5], report.rows, strict=True):
        name, accuracy, difference, verdict, rounds, uplink = columns(line)
        assert row.spread is not None
        assert name == row.variant
        assert accuracy == row.spread.over_seeds.text()
        if row.control is None:
            assert (difference, verdict) == ("(control)", "")
        else:
            assert difference == t_interval(row.control.difference)
            assert verdict == row.control.in_words
        assert "[" in rounds or "of 2" in rounds
        assert uplink.endswith("B")


def test_the_table_is_aligned_and_says_how_to_read_it(results: list[Result]) -> None:
    table, legend = comparison_table(results).split("\n\n")
    assert len({len(line) for line in table.splitlines()}) == 1
    assert "paired by seed" in legend
    assert "mean over 2 seeds" in legend


def test_one_seed_is_not_called_significant(results: list[Result]) -> None:
    def first_seed(result: Result) -> Result:
        config: dict[str, Any] = {**SMALL, "method": result.config.method, "seeds": [0]}
        return fedglimpse.run(config)

    text = comparison_table([first_seed(result) for result in results[:2]])
    assert "run several" in text
    assert "inconclusive" in text
