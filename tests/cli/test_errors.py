"""Errors that end in one sentence without being raised as a UserError."""

from __future__ import annotations

import pytest
import torch

from fedglimpse.cli import main as cli
from fedglimpse.errors import TOO_LARGE, DeviceLost, lacks_memory


def asks_for_too_much() -> None:
    torch.empty(1 << 55)


def test_a_lack_of_memory_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", asks_for_too_much)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"fedglimpse: {TOO_LARGE}\n"


def test_other_errors_are_not_taken_for_it() -> None:
    assert lacks_memory(MemoryError())
    assert lacks_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not lacks_memory(RuntimeError("shapes cannot be multiplied"))


def test_a_lost_gpu_ends_the_process_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is cleaned up: freeing what lies on it would abort."""

    def lost() -> None:
        raise DeviceLost("The GPU stopped working.")

    def leave(code: int) -> None:
        raise KeyboardInterrupt(code)

    monkeypatch.setattr(cli, "app", lost)
    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(KeyboardInterrupt) as ended:
        cli.main()
    assert ended.value.args == (2,)
    assert capsys.readouterr().err == "fedglimpse: The GPU stopped working.\n"
