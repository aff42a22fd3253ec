"""A checkpoint of devices that is whole but cannot be right is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

from small_federation import config, grid, serve

from fedglimpse.storage.checkpoint import Checkpoint
from mistakes import mistake


def with_nan(state: dict[str, Any]) -> None:
    state["federation"]["state"][3] = torch.nan


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a negative round": lambda state: state.update(round=-1),
    "a round after the last": lambda state: state.update(round=9),
    "a model that is not finite": with_nan,
    "negative visits": lambda state: state["federation"].update(visits=-1),
    "no selector": lambda state: state["federation"].pop("selector"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_cannot_be_right_is_refused(name: str, tmp_path: Path) -> None:
    serve(grid(), config(rounds=1), tmp_path / "o")
    state = Checkpoint(tmp_path / "o").read()
    assert state is not None
    CHANGES[name](state)
    Checkpoint(tmp_path / "o").save(state, {})
    with mistake("--resume"):
        serve(grid(), config(rounds=1), tmp_path / "o")
