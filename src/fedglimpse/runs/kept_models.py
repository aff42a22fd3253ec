"""Global models that a run kept on its way: `RUN/models/round-000010.pt`, one row for each lane.

The file of round t holds the models that round t started from, so that it belongs to the visible
and selected clients of record t. The last file is the final model.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from fedglimpse.errors import UserError
from fedglimpse.runs.folder import writing

FOLDER = "models"
_NAME = re.compile(r"round-(\d{6,})\.pt")


def save_models(run: Path, round_num: int, states: Tensor) -> Path:
    """Write the global states that round `round_num` starts from.

    Args:
        run: the run folder.
        round_num: rounds played so far.
        states: one for each lane of the run.  # [R, d]
    """
    path = run / FOLDER / f"round-{round_num:06d}.pt"
    temporary = path.with_suffix(".part")
    with writing(run):
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(states.detach().float().cpu().clone(), temporary)
        temporary.replace(path)
    return path


def kept_models(run: Path) -> dict[int, Path]:
    """Return the files of kept models by round, in order; empty where none were kept."""
    found = [(_NAME.fullmatch(path.name), path) for path in (run / FOLDER).glob("round-*.pt")]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def load_models(path: Path) -> Tensor:
    """Read the states of one file `[R, d]`."""
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}): delete it to go on without it."
        ) from None
    if not isinstance(states, Tensor) or states.dim() != 2:
        raise UserError(f"{path} holds no table of model states: delete it to go on without it.")
    return states
