"""`checkpoint.keep_models`: global models of every n-th round beside the records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedglimpse
from fedglimpse.runs.experiment import Stopped, run
from fedglimpse.runs.kept_models import kept_models, load_models, save_models
from fedglimpse.theory.panel import measure_run
from mistakes import mistake
from theory.small_run import SMALL, run_with_models

EVERY_SECOND: dict[str, Any] = {
    **SMALL,
    "method": "fedavg",
    "seeds": [0, 1],
    "checkpoint.keep_models": 2,
    "rounds": 5,
}


def assert_same_models(run_a: Path, run_b: Path) -> None:
    files_a = kept_models(run_a)
    files_b = kept_models(run_b)
    assert list(files_a) == list(files_b)
    for round_num, path in files_a.items():
        torch.testing.assert_close(load_models(path), load_models(files_b[round_num]))


def test_models_of_every_second_round_and_the_last_are_kept(tmp_path: Path) -> None:
    result = fedglimpse.run(EVERY_SECOND, tmp_path / "a")
    files = kept_models(tmp_path / "a")
    assert list(files) == [0, 2, 4, 5]
    torch.testing.assert_close(load_models(files[5]), result.world.states.cpu())
    panel = measure_run(tmp_path / "a")
    assert [point.round for point in panel.lanes[1].points] == [0, 2, 4]


def test_they_are_the_models_that_rounds_started_from(tmp_path: Path) -> None:
    fedglimpse.run({**EVERY_SECOND, "checkpoint.keep_models": 1}, tmp_path / "a")
    by_hand = run_with_models(tmp_path / "b", method="fedavg", seeds=[0, 1], rounds=5)
    for round_num, path in kept_models(by_hand).items():
        stored = load_models(kept_models(tmp_path / "a")[round_num])
        torch.testing.assert_close(stored, load_models(path))


def test_zero_keeps_none(tmp_path: Path) -> None:
    fedglimpse.run({**EVERY_SECOND, "checkpoint.keep_models": 0}, tmp_path / "a")
    assert not (tmp_path / "a" / "models").exists()


def test_a_resumed_run_keeps_the_same_models(tmp_path: Path) -> None:
    fedglimpse.run(EVERY_SECOND, tmp_path / "a")
    stop_signals = iter([False, False, True])
    with pytest.raises(Stopped):
        run(EVERY_SECOND, tmp_path / "b", should_stop=lambda: next(stop_signals))
    run(EVERY_SECOND, tmp_path / "b", resume=True)
    assert_same_models(tmp_path / "a", tmp_path / "b")


def test_a_negative_number_is_a_users_mistake() -> None:
    with mistake("checkpoint.keep_models"):
        fedglimpse.run({**EVERY_SECOND, "checkpoint.keep_models": -1})


def test_models_come_back_in_the_order_of_rounds(tmp_path: Path) -> None:
    states = torch.randn(2, 5)
    for round_num in (20, 0, 1_000_000, 3):
        save_models(tmp_path, round_num, states + round_num)
    assert list(kept_models(tmp_path)) == [0, 3, 20, 1_000_000]
    torch.testing.assert_close(load_models(kept_models(tmp_path)[3]), states + 3)


def test_other_files_are_no_models(tmp_path: Path) -> None:
    save_models(tmp_path, 1, torch.zeros(1, 2))
    (tmp_path / "models" / "round-best.pt").write_text("a user's own file")
    assert list(kept_models(tmp_path)) == [1]
    assert not kept_models(tmp_path / "elsewhere")


@pytest.mark.parametrize("content", [b"not a file of torch", None])
def test_a_damaged_file_is_a_users_mistake(tmp_path: Path, content: bytes | None) -> None:
    path = save_models(tmp_path, 1, torch.zeros(1, 2))
    if content is None:
        torch.save({"a": 1}, path)
    else:
        path.write_bytes(content)
    with mistake():
        load_models(path)


def test_saving_again_replaces(tmp_path: Path) -> None:
    save_models(tmp_path, 1, torch.zeros(1, 2))
    path = save_models(tmp_path, 1, torch.ones(1, 2))
    assert float(load_models(path).sum()) == 2.0
    assert [file.name for file in path.parent.iterdir()] == [path.name]
