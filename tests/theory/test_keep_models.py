"""`checkpoint.keep_models`: global models of every n-th round beside the records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedglimpse
from fedglimpse.runs.experiment import Stopped, run
from fedglimpse.runs.kept_models import kept_models, load_models
from fedglimpse.theory.measure_run import measure_run
from theory.kept_run import SMALL, kept_run

KEEPING = {**SMALL, "method": "fedavg", "seeds": [0, 1], "checkpoint.keep_models": 2, "rounds": 5}


def test_models_of_every_second_round_and_the_last_are_kept(tmp_path: Path) -> None:
    result = fedglimpse.run(KEEPING, tmp_path / "a")
    kept = kept_models(tmp_path / "a")
    assert list(kept) == [0, 2, 4, 5]
    torch.testing.assert_close(load_models(kept[5]), result.world.states.cpu())


def test_they_are_the_models_that_rounds_started_from(tmp_path: Path) -> None:
    fedglimpse.run({**KEEPING, "checkpoint.keep_models": 1}, tmp_path / "a")
    by_hand = kept_run(tmp_path / "b", method="fedavg", seeds=[0, 1], rounds=5)
    for round_num, path in kept_models(by_hand).items():
        torch.testing.assert_close(
            load_models(kept_models(tmp_path / "a")[round_num]), load_models(path)
        )


def test_none_are_kept_unless_asked_for(tmp_path: Path) -> None:
    fedglimpse.run({**KEEPING, "checkpoint.keep_models": 0}, tmp_path / "a")
    assert not (tmp_path / "a" / "models").exists()


def test_a_resumed_run_keeps_the_same_models(tmp_path: Path) -> None:
    fedglimpse.run(KEEPING, tmp_path / "a")
    asked = iter([False, False, True])
    with pytest.raises(Stopped):
        run(KEEPING, tmp_path / "b", should_stop=lambda: next(asked))
    run(KEEPING, tmp_path / "b", resume=True)
    ours, theirs = kept_models(tmp_path / "a"), kept_models(tmp_path / "b")
    assert list(ours) == list(theirs)
    for round_num in ours:
        torch.testing.assert_close(load_models(ours[round_num]), load_models(theirs[round_num]))


def test_a_run_with_kept_models_is_measured_at_them(tmp_path: Path) -> None:
    fedglimpse.run(KEEPING, tmp_path / "a")
    panel = measure_run(tmp_path / "a")
    assert [p.round for p in panel.lanes[1].points] == [0, 2, 4]


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(fedglimpse.UserError, match="keep_models"):
        fedglimpse.run({**KEEPING, "checkpoint.keep_models": -1})
