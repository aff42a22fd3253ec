from __future__ import annotations

from pathlib import Path

import pytest
import typer
from made_up import records_of, write_run
from typer.testing import CliRunner

from fedglimpse.cli.results import report
from fedglimpse.errors import UserError

WORDS = {"data.name": "digits", "data.partition": "label_skew", "rounds": 20, "seeds": [0, 1]}
app = typer.Typer()
app.command()(report)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for method, top in (("fedavg", 0.7), ("glimpse", 0.8)):
        records = [r for s in (0, 1) for r in records_of(s, 20, 40, top, pace=0.3)]
        write_run(tmp_path / "runs" / method, {**WORDS, "method": method}, records)
    return tmp_path / "runs"


def called(*words: object) -> str:
    result = CliRunner().invoke(app, [str(w) for w in words], env={"COLUMNS": "160"})
    if result.exception is not None:
        raise result.exception
    return result.output


def test_everything_is_written(folder: Path) -> None:
    output = called(folder, "--control", "glimpse", "--target", 0.75)
    assert "fedavg" in output
    assert "0 of 2" in output
    assert "paired by seed, with a 95 % t interval" in output
    names = {p.name for p in (folder / "report").iterdir()}
    assert names == {"report.html", "results.csv", "seeds.csv", "results.tex", "study.json.gz"}
    assert f"page: {folder / 'report' / 'report.html'}" in output.replace("\n", "")


def test_a_stored_study_gives_the_same_tables(folder: Path, tmp_path: Path) -> None:
    called(folder)
    called(folder / "report" / "study.json.gz", "--out", tmp_path / "again")
    for name in ("results.csv", "seeds.csv", "results.tex", "study.json.gz"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / "report" / name).read_bytes()
    assert called(folder)  # the report's own folder is no run and does not disturb


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "There is no nowhere"),
        ((".", "--target", "80"), "--target 80.0 is not an accuracy"),
        ((".", "--control", "nobody"), "control 'nobody'"),
        ((".", "--paper", "none.toml"), "no file none.toml"),
        ((".", "--paper", "."), r"\. is a folder: give the path"),
        ((".", "--out", "fedavg/config.toml"), "is a file"),
    ],
)
def test_mistakes_are_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=message):
        called(*words)


def test_nothing_recorded_yet(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {**WORDS, "method": "fedavg"}, [], finish=False)
    with pytest.raises(UserError, match="no finished run yet"):
        called(tmp_path / "run")
