"""What a run has to say before its first round, without being a mistake.

`fedglimpse run --resume`: which run is meant, and what is said where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from fedglimpse.config.loading import parse_words
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.methods.registry import MODULES
from fedglimpse.runs.folder import stored_config
from fedglimpse.runs.pretrain import METHOD
from fedglimpse.runs.progress import Listener


def without_effect(config: Config, settings: Sequence[str]) -> str:
    """Name the `agent.*` of the command line that this method does not have; none: nothing."""
    given = [name for name in parse_words(settings) if name.startswith("agent.")]
    if not given or config.method == METHOD or config.method not in MODULES:
        return ""  # a method of the user's own may read them
    has = "has" if len(given) == 1 else "have"
    return (
        f"{', '.join(given)} {has} no effect with method={config.method}: only "
        f"method={METHOD} has that agent."
    )


class SaysFirst:
    """Passes everything on to another listener, once it has said something."""

    def __init__(self, inner: Listener, text: str) -> None:
        """Get ready to say `text`."""
        self.inner, self.text = inner, text

    def begin(self, name: str, done: int, total: int) -> None:
        """Say it: all that can be wrong with the run has been found by now."""
        typer.echo(self.text, err=True)
        self.inner.begin(name, done, total)

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """Pass it on."""
        self.inner.round(records)

    def end(self) -> None:
        """Pass it on."""
        self.inner.end()


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
