"""A checkpoint that is whole but cannot be right is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedglimpse.errors import UserError
from fedglimpse.runs.experiment import Stopped, run
from fedglimpse.storage.checkpoint import Checkpoint

SETTINGS = {"method": "glimpse", "rounds": 4, "data.clients": 8, "visibility.cluster_size": 4}
State = dict[str, Any]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """Return a run that was stopped after two rounds, and its checkpoint."""
    folder = tmp_path_factory.mktemp("run") / "r"
    rounds_left = iter([False, True])
    with pytest.raises(Stopped):
        run(SETTINGS, folder, should_stop=lambda: next(rounds_left))
    state = Checkpoint(folder).read()
    assert state is not None
    return folder, state


def first_lane(change: Callable[[State], None]) -> Callable[[State], None]:
    return lambda state: change(state["lanes"][0])


def with_nan(lane: State) -> None:
    lane["state"][3] = torch.nan


CHANGES: dict[str, Callable[[State], object]] = {
    "a negative round": lambda state: state.update(round=-1),
    "a round after the last": lambda state: state.update(round=5),
    "a round that is no number": lambda state: state.update(round="2"),
    "a lane of a negative round": first_lane(lambda lane: lane.update(round=-3)),
    "a model that is not finite": first_lane(with_nan),
    "a model of another size": first_lane(lambda lane: lane.update(state=lane["state"][1:])),
    "a model of whole numbers": first_lane(lambda lane: lane.update(state=lane["state"].long())),
    "a sparse model": first_lane(lambda lane: lane.update(state=lane["state"].to_sparse())),
    "no model": first_lane(lambda lane: lane.pop("state")),
    "negative visits": first_lane(lambda lane: lane.update(visits=-1)),
    "no lanes": lambda state: state.update(lanes=[]),
    "lanes that are no list": lambda state: state.update(lanes=3),
    "too many lanes": lambda state: state["lanes"].append(state["lanes"][0]),
    "no selector": first_lane(lambda lane: lane.pop("selector")),
    "another selector": first_lane(lambda lane: lane.update(selector={"agent": 3})),
    "no bytes": lambda state: state.pop("bytes"),
    "negative bytes": lambda state: state.update(bytes=-1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_cannot_be_right_is_refused(
    name: str, stopped: tuple[Path, State], tmp_path: Path
) -> None:
    folder, whole = stopped
    changed = torch_copy(whole)
    CHANGES[name](changed)
    copy = tmp_path / "r"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    Checkpoint(copy).save(changed, {})
    with pytest.raises(UserError) as caught:
        run(SETTINGS, copy, resume=True)
    assert caught.value.key in ("--resume", "--out")
    assert "checkpoint.pt" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def torch_copy(value: Any) -> Any:
    """Return a copy that shares nothing with a state."""
    if isinstance(value, dict):
        return {key: torch_copy(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [torch_copy(entry) for entry in value]
    return value.clone() if isinstance(value, torch.Tensor) else value
