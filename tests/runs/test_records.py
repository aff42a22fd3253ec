from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedglimpse.config.loading import resolve
from fedglimpse.runs.folder import RunFolder
from fedglimpse.storage import checkpoint
from fedglimpse.storage.checkpoint import settle
from mistakes import mistake
from rewriting import rewrite

CONFIG = resolve({"rounds": 5})


def opened(path: Path, resume: bool = False) -> tuple[RunFolder, dict[str, Any] | None]:
    folder = RunFolder(path)
    return folder, folder.open(CONFIG, resume)


def test_resuming_cuts_lines_back_to_the_checkpoint(tmp_path: Path) -> None:
    folder, state = opened(tmp_path / "r")
    assert state is None
    folder.append([{"round": 0}])
    folder.save({"x": torch.ones(2)})
    folder.append([{"round": 1}])
    with folder.rounds.open("a") as file:
        file.write('{"round": 2, "cut')  # killed in the middle of a line
    assert [r["round"] for r in folder.read()] == [0, 1]
    folder, state = opened(tmp_path / "r", resume=True)
    assert state is not None
    assert state["x"].tolist() == [1, 1]
    assert [r["round"] for r in folder.read()] == [0]


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path) -> None:
    folder, _ = opened(tmp_path / "r")
    folder.append([{"round": 0}])
    folder, state = opened(tmp_path / "r", resume=True)
    assert state is None
    assert folder.read() == []


def test_every_reader_of_json_takes_what_diverged(tmp_path: Path) -> None:
    folder, _ = opened(tmp_path / "r")
    folder.append([{"round": 0, "loss": float("inf"), "q": [1.0, float("nan")], "info": {"a": 2}}])

    def refuse(name: str) -> None:
        raise ValueError(name)

    line = json.loads(folder.rounds.read_text(), parse_constant=refuse)
    assert line == {"round": 0, "loss": None, "q": [1.0, None], "info": {"a": 2}}


def test_damaged_records_are_one_sentence(tmp_path: Path) -> None:
    folder, _ = opened(tmp_path / "r")
    folder.rounds.write_bytes(b'{"round": 0}\n\xff\xfe{\n{"round": 2}\n')
    with mistake("--out"):
        folder.read()


def test_another_run_is_never_touched(tmp_path: Path) -> None:
    folder, _ = opened(tmp_path / "r")
    folder.append([{"round": 0}])
    with mistake("rounds"):
        RunFolder(tmp_path / "r").open(resolve({"rounds": 6}), resume=True)
    with mistake("--resume"):
        RunFolder(tmp_path / "r").open(CONFIG, resume=False)
    assert [r["round"] for r in folder.read()] == [0]


def test_the_engine_may_change_between_runs(tmp_path: Path) -> None:
    opened(tmp_path / "r")
    other = resolve({"rounds": 5, "engine.trainer": "serial"})
    RunFolder(tmp_path / "r").open(other, resume=True)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with mistake("--out"):
        opened(tmp_path)
    (tmp_path / "file").write_text("")
    with mistake("--out"):
        opened(tmp_path / "file")


def test_a_checkpoint_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = opened(tmp_path / "r")
    folder.append([{"round": 0}])
    for other in (checkpoint.FORMAT - 1, 99):
        monkeypatch.setattr(checkpoint, "FORMAT", other)
        folder.save({})
        monkeypatch.undo()
        with mistake("--resume"):
            opened(tmp_path / "r", resume=True)
    folder.checkpoint.path.write_bytes(b"not a checkpoint")
    with mistake("--resume"):
        opened(tmp_path / "r", resume=True)
    assert len(folder.read()) == 1


def test_a_run_of_another_version_is_not_mixed_with_this_one(tmp_path: Path) -> None:
    folder, _ = opened(tmp_path / "r")
    folder.append([{"round": 0}])
    folder.save({})
    stored = json.loads(folder.environment.read_text())
    rewrite(folder.environment, json.dumps({**stored, "fedglimpse": "0.0.9"}))
    with mistake("--out"):
        opened(tmp_path / "r", resume=True)
    assert json.loads(folder.environment.read_text())["fedglimpse"] == "0.0.9"
    folder.finish({})  # what is finished is not mixed any more
    opened(tmp_path / "r", resume=True)


def test_a_full_disk_is_one_sentence_and_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = opened(tmp_path / "r")
    folder.append([{"round": 0}])
    folder.save({"x": 1})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with mistake("--out"):
        folder.save({"x": 2})
    monkeypatch.undo()
    assert not list(folder.path.glob("*.part"))
    _, state = opened(tmp_path / "r", resume=True)
    assert state is not None
    assert state["x"] == 1


def saved_at(path: Path, *, current: int = 0, coming: int = 0) -> RunFolder:
    """Leave a folder as a kill would, with checkpoints of these rounds."""
    folder, _ = opened(path)
    if current:
        folder.save({"round": current})
    if coming:
        folder.prepare({"round": coming})
    return folder


@pytest.mark.parametrize(
    ("rounds_on_disk", "expected"),
    [
        ([(10, 20), (10, 0)], 10),  # cut while the coming ones were written
        ([(0, 20), (0, 0)], 0),  # the same, in the first time
        ([(20, 0), (10, 20)], 20),  # cut while they were taken over
        ([(20, 0), (0, 20)], 20),
        ([(10, 20)], 20),  # alone, all that is whole counts
    ],
)
def test_runs_cut_while_they_saved_go_on_from_the_same_round(
    rounds_on_disk: list[tuple[int, int]], expected: int, tmp_path: Path
) -> None:
    folders = [
        saved_at(tmp_path / str(i), current=a, coming=b) for i, (a, b) in enumerate(rounds_on_disk)
    ]
    settle([folder.checkpoint for folder in folders])
    for folder in folders:
        state = folder.checkpoint.read()
        assert (0 if state is None else state["round"]) == expected
        assert not folder.checkpoint.coming.exists()


def test_a_coming_checkpoint_that_was_damaged_does_not_count(tmp_path: Path) -> None:
    one, other = (
        saved_at(tmp_path / "a", current=10, coming=20),
        saved_at(tmp_path / "b", current=10),
    )
    one.checkpoint.coming.write_bytes(b"damaged")
    settle([one.checkpoint, other.checkpoint])
    assert [f.checkpoint.read()["round"] for f in (one, other)] == [10, 10]  # type: ignore[index]
    assert not one.checkpoint.coming.exists()


def test_runs_that_share_no_round_keep_their_own(tmp_path: Path) -> None:
    one, other = (
        saved_at(tmp_path / "a", current=10, coming=20),
        saved_at(tmp_path / "b", current=5),
    )
    settle([one.checkpoint, other.checkpoint])
    assert [f.checkpoint.read()["round"] for f in (one, other)] == [10, 5]  # type: ignore[index]
