"""Live progress of a run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 5.0  # plain lines come no faster than this


class Listener(Protocol):
    """Told about a run as it goes on."""

    def begin(self, name: str, done: int, total: int) -> None:
        """A run starts, or goes on after `done` of `total` rounds."""

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """A round has ended, with one record for each lane."""

    def end(self) -> None:
        """The run has ended or was stopped."""


class Silent:
    """Says nothing."""

    def begin(self, name: str, done: int, total: int) -> None:
        """Ignore."""

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """Ignore."""

    def end(self) -> None:
        """Ignore."""


class Bar:
    """A progress bar with round, accuracy and time left."""

    def begin(self, name: str, done: int, total: int) -> None:
        """Show the bar."""
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[accuracy]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.accuracy = ""
        self.bar.start()
        self.task = self.bar.add_task(name, total=total, completed=done, accuracy="")

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """Advance the bar."""
        text = mean_accuracy(records)
        self.accuracy = f"accuracy {text}" if text else self.accuracy
        self.bar.update(self.task, advance=1, accuracy=self.accuracy)

    def end(self) -> None:
        """Leave the bar as it is."""
        self.bar.stop()


class Lines:
    """A line now and then, for logs."""

    def begin(self, name: str, done: int, total: int) -> None:
        """Remember when the run started."""
        self.name, self.done, self.total, self.first = name, done, total, done
        self.started = self.last = time.monotonic()
        self.accuracy = "-"

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """Print a line if the last one is old enough, and at the end."""
        self.done += 1
        self.accuracy = mean_accuracy(records) or self.accuracy
        now = time.monotonic()
        if now - self.last < LINE_SECONDS and self.done < self.total:
            return
        self.last = now
        pace = (now - self.started) / max(self.done - self.first, 1)
        left = round(pace * (self.total - self.done))
        print(
            f"{self.name}: round {self.done}/{self.total}, accuracy {self.accuracy}, {left} s left",
            file=sys.stderr,
            flush=True,
        )

    def end(self) -> None:
        """Nothing more to say."""


def mean_accuracy(records: Sequence[dict[str, Any]]) -> str:
    """Return the mean test accuracy of the lanes, or an empty string where none was scored."""
    scored = [r["accuracy"] for r in records if r["accuracy"] is not None]
    return f"{sum(scored) / len(scored):.3f}" if scored else ""


def listener(quiet: bool) -> Listener:
    """Pick what fits: nothing, a bar on a terminal, lines elsewhere."""
    if quiet:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()
