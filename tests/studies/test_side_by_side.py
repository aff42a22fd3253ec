"""Methods compared in several processes: the runs of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import fedglimpse
from fedglimpse.cli.options import read_number
from fedglimpse.config.loading import resolve
from fedglimpse.errors import UserError
from fedglimpse.runs.experiment import Stopped
from fedglimpse.runs.folder import RunFolder
from fedglimpse.runs.progress import Silent
from fedglimpse.studies.side_by_side import _Progress, run_side_by_side

WORDS = ["fedavg", "fedavg-window", "rounds=4", "seeds=[0,1]", "-q"]


def records(folder: Path) -> list[dict[str, Any]]:
    return [{**record, "seconds": 0} for record in RunFolder(folder).read()]


class Rounds(Silent):
    def __init__(self) -> None:
        self.total = 0
        self.lanes: list[int] = []

    def begin(self, name: str, done: int, total: int) -> None:
        self.total = total - done

    def round(self, records: Any) -> None:
        self.lanes.append(len(records))


def test_a_comparison_in_two_processes_has_the_records_of_one(tmp_path: Path) -> None:
    outputs = {}
    for workers in ("1", "2"):
        out = tmp_path / workers
        done = fedglimpse("compare", *WORDS, "--workers", workers, "--out", str(out))
        assert done.returncode == 0, done.stderr
        outputs[workers] = done.stdout.partition("results:")[0]
    assert outputs["1"] == outputs["2"]
    for method in ("fedavg", "fedavg-window"):
        assert records(tmp_path / "1" / method) == records(tmp_path / "2" / method)
        assert not list((tmp_path / "2").rglob("*.lock"))


def test_runs_are_followed_stopped_and_resumed(tmp_path: Path) -> None:
    runs = []
    for method in ("fedavg", "mifa"):
        config = resolve({"method": method, "rounds": 400, "seeds": [0, 1]})
        runs.append((config, tmp_path / method))
    rounds = Rounds()
    with pytest.raises(Stopped):
        run_side_by_side(runs, 2, rounds, lambda: len(rounds.lanes) > 2)
    assert rounds.total == 800
    assert set(rounds.lanes) == {2}
    assert any((tmp_path / method / "checkpoint.pt").exists() for method in ("fedavg", "mifa"))


def test_a_run_that_cannot_be_built_is_one_sentence(tmp_path: Path) -> None:
    config = resolve({"method": "fedavg", "rounds": 2, "data.clients": 4000})
    with pytest.raises(UserError):
        run_side_by_side([(config, tmp_path / "a")], 1, Silent(), lambda: False)


def test_rounds_are_read_once_even_if_they_are_repeated(tmp_path: Path) -> None:
    progress = _Progress(resolve({"seeds": [0, 1]}), tmp_path)
    file = tmp_path / "rounds.jsonl"
    lines = [json.dumps({"round": i // 2, "lane": i % 2}) + "\n" for i in range(6)]
    file.write_text("".join(lines[:3]))
    assert [len(records) for records in progress.new_rounds()] == [2]
    file.write_text("".join(lines[:4]) + '{"round": 2, "cut')
    assert [records[0]["round"] for records in progress.new_rounds()] == [1]
    file.write_text("".join(lines[:2]))
    assert progress.new_rounds() == []
    file.write_text("".join(lines))
    assert [records[0]["round"] for records in progress.new_rounds()] == [2]
    assert read_number("--workers", "auto") is None
