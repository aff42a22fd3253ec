"""Global models that a run kept on its way: `RUN/models/round-000010.pt`, one row for each lane.

The file of round t holds the models that round t started from, so it belongs to the visible and
selected clients of record t. The last file is the final model.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import torch
from torch import Tensor

from fedglimpse.runs.folder import writing
from fedglimpse.storage import store

FOLDER = "models"
DELETE = "delete it to continue without it"
FILE_NAME = re.compile(r"round-(\d{6,})\.pt")


def save_models(run: Path, round_num: int, states: Tensor) -> Path:
    """Write the global states that round `round_num` starts from.

    Args:
        run: the run folder.
        round_num: rounds finished so far.
        states: one for each lane of the run.  # [R, d]
    """
    path = run / FOLDER / f"round-{round_num:06d}.pt"
    buffer = io.BytesIO()
    torch.save(states.detach().float().cpu().clone(), buffer)
    content = buffer.getbuffer()
    with writing(run):
        store.make_folder(path.parent)
        store.write(path, content, store.seal(content))
    return path


def kept_models(run: Path) -> dict[int, Path]:
    """Return the files of kept models by round, in order; empty if there are none."""
    by_round: dict[int, Path] = {}
    for path in (run / FOLDER).glob("round-*.pt"):
        match = FILE_NAME.fullmatch(path.name)
        if match:
            by_round[int(match[1])] = path
    return dict(sorted(by_round.items()))


def load_models(path: Path) -> Tensor:
    """Read the states of one file `[R, d]`."""
    content = store.unsealed(path, DELETE)
    try:
        states = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise store.damage(path, type(error).__name__, DELETE) from None
    if not isinstance(states, Tensor) or states.dim() != 2 or not bool(states.isfinite().all()):
        raise store.damage(path, "it holds no table of finite model states", DELETE)
    return states
