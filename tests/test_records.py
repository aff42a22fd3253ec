from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from fedglimpse import records
from fedglimpse.configure import resolve
from fedglimpse.errors import UserError
from fedglimpse.records import RunFolder

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


def test_another_run_is_never_touched(tmp_path: Path) -> None:
    folder, _ = opened(tmp_path / "r")
    folder.append([{"round": 0}])
    with pytest.raises(UserError, match=r"holds another run \(rounds=5, asked for 6"):
        RunFolder(tmp_path / "r").open(resolve({"rounds": 6}), resume=True)
    with pytest.raises(UserError, match="add --resume"):
        RunFolder(tmp_path / "r").open(CONFIG, resume=False)
    assert [r["round"] for r in folder.read()] == [0]


def test_the_engine_may_change_between_runs(tmp_path: Path) -> None:
    opened(tmp_path / "r")
    other = resolve({"rounds": 5, "engine.trainer": "serial"})
    RunFolder(tmp_path / "r").open(other, resume=True)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        opened(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        opened(tmp_path / "file")


def test_a_checkpoint_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = opened(tmp_path / "r")
    folder.append([{"round": 0}])
    monkeypatch.setattr(records, "FORMAT", 99)
    folder.save({})
    monkeypatch.undo()
    with pytest.raises(UserError, match="has format 99"):
        opened(tmp_path / "r", resume=True)
    folder.checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="cannot be read"):
        opened(tmp_path / "r", resume=True)
    assert len(folder.read()) == 1


def test_a_full_disk_is_one_sentence_and_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = opened(tmp_path / "r")
    folder.append([{"round": 0}])
    folder.save({"x": 1})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"No space left on device.*--resume"):
        folder.save({"x": 2})
    monkeypatch.undo()
    assert not list(folder.path.glob("*.part"))
    _, state = opened(tmp_path / "r", resume=True)
    assert state is not None
    assert state["x"] == 1
