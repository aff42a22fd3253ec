"""Listeners of a run: a progress bar, plain lines, or a profiler trace (`run --profile`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.profiler import ProfilerActivity, profile, schedule

from fedglimpse.errors import UserError

LINE_SECONDS = 5.0  # between two plain lines, at least
TRACE = "trace.json"  # in the run folder; open it in Perfetto or chrome://tracing
SKIPPED_ROUNDS = 1  # before the profiler warms up
WARM_UP_ROUNDS = 1
TRACED_ROUNDS = 3


class Listener(Protocol):
    """Follows a run."""

    def begin(self, name: str, done: int, total: int) -> None:
        """A run starts, or resumes after `done` of `total` rounds."""

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """A round has ended, with one record for each lane."""

    def end(self) -> None:
        """The run has finished or was stopped."""


class Silent:
    """Ignores everything; also a base for listeners that need only some of the calls."""

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
        if text:
            self.accuracy = f"accuracy {text}"
        self.bar.update(self.task, advance=1, accuracy=self.accuracy)

    def end(self) -> None:
        """Leave the bar as it is."""
        self.bar.stop()


class Lines(Silent):
    """A line every few seconds, for logs."""

    def begin(self, name: str, done: int, total: int) -> None:
        """Remember when the run started."""
        self.name = name
        self.first = done
        self.done = done
        self.total = total
        self.accuracy = "-"
        self.started = time.monotonic()
        self.last_line = self.started

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """Print a line if the last one is old enough, and at the end."""
        self.done += 1
        self.accuracy = mean_accuracy(records) or self.accuracy
        time_now = time.monotonic()
        if time_now - self.last_line < LINE_SECONDS and self.done < self.total:
            return
        self.last_line = time_now
        seconds_per_round = (time_now - self.started) / max(self.done - self.first, 1)
        seconds_left = round(seconds_per_round * (self.total - self.done))
        print(
            f"{self.name}: round {self.done}/{self.total}, accuracy {self.accuracy}, "
            f"{seconds_left} s left",
            file=sys.stderr,
            flush=True,
        )


class Profiled:
    """Writes a profiler trace of rounds 3 to 5, and passes everything on to another listener."""

    def __init__(self, inner: Listener, folder: Path, rounds: int) -> None:
        """Get ready to write `trace.json` into `folder`.

        Raises:
            UserError: for a run that ends before the first traced round.
        """
        untraced = SKIPPED_ROUNDS + WARM_UP_ROUNDS
        if rounds <= untraced:
            raise UserError(
                f"rounds={rounds} is too short for --profile, whose first {untraced} rounds are "
                f"not traced: use rounds={untraced + TRACED_ROUNDS} or more.",
                key="rounds",
            )
        self.inner = inner
        path = folder / TRACE
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(
            activities=activities,
            schedule=schedule(
                wait=SKIPPED_ROUNDS,
                warmup=WARM_UP_ROUNDS,
                active=min(TRACED_ROUNDS, rounds - untraced),
                repeat=1,
            ),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        )

    def begin(self, name: str, done: int, total: int) -> None:
        """Start the profiler."""
        self.inner.begin(name, done, total)
        self.profiler.start()

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """Tell the profiler that a round is over; it writes its trace after the last traced one."""
        self.inner.round(records)
        self.profiler.step()

    def end(self) -> None:
        """Stop the profiler."""
        self.profiler.stop()
        self.inner.end()


def mean_accuracy(records: Sequence[dict[str, Any]]) -> str:
    """Return the mean test accuracy of the scored lanes, or an empty string if there are none."""
    scored = [record["accuracy"] for record in records if record["accuracy"] is not None]
    return f"{sum(scored) / len(scored):.3f}" if scored else ""


def listener(quiet: bool) -> Listener:
    """Return a listener that is silent, a bar on a terminal, or lines elsewhere."""
    if quiet:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()
