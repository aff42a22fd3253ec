"""What a run has to say before its first round, without being a mistake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from fedglimpse.config import Config
from fedglimpse.configure import parse_words
from fedglimpse.methods.registry import MODULES
from fedglimpse.progress import Listener
from fedglimpse.teach import METHOD


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
