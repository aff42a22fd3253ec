"""`fedglimpse run --resume`: which run is meant, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

from fedglimpse.config import Config
from fedglimpse.errors import UserError
from fedglimpse.records import stored_config

NEW_RUN = "nothing there to resume: a new run begins"


def holds_run(folder: Path) -> bool:
    """True where a run has begun in a folder."""
    return (folder / "config.toml").exists()


def resumed_config(folder: Path, named: bool) -> Config:
    """Return the configuration of a run that is known by its folder alone.

    Args:
        folder: where the run should be.
        named: whether the user said so, or it is where results go otherwise.

    Raises:
        UserError: where no run is there.
    """
    if holds_run(folder):
        return stored_config(folder)
    what = "holds no run" if folder.exists() else "is not there"
    where, fix = (f"--out {folder}", "") if named else (str(folder), " with --out")
    raise UserError(
        f"{where} {what}, so there is nothing to resume: name the folder of a run{fix}, or give "
        "settings to begin one."
    )
