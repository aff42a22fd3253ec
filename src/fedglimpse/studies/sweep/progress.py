"""How far a sweep is: cells done, running and left, and when it will be over."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

LINE_SECONDS = 5.0  # between two plain lines, at least


@dataclass
class CellWork:
    """The rounds of one cell that is not done yet."""

    group: str  # cells of a group take about the same time for a round
    rounds: int
    rounds_run: int

    @property
    def left(self) -> int:
        """Rounds left."""
        return max(self.rounds - self.rounds_run, 0)


class SweepStatus:
    """Counts cells and estimates the end from the pace of every group so far."""

    def __init__(self, work: Mapping[str, CellWork], done: int, failed: int) -> None:
        """Start counting.

        Args:
            work: of the cells that are left, by id.
            done: cells that were done before.
            failed: cells that failed before.
        """
        self.work = dict(work)
        self.done = done
        self.failed = failed
        self.running: list[str] = []
        self.current_round = ""  # such as `round 3 of 60`
        self._rounds_of_running: Counter[str] = Counter()  # by group
        self._measured_rounds: Counter[str] = Counter()  # by group
        self._measured_seconds: dict[str, float] = {}

    def run(self, cells: Sequence[str]) -> None:
        """Note which cells are running now."""
        self.running = list(cells)
        self.current_round = ""
        self._rounds_of_running.clear()

    def measured(self, group: str, rounds: int, seconds: float) -> None:
        """Note how long some rounds of running cells took."""
        self._rounds_of_running[group] += rounds
        self._measured_rounds[group] += rounds
        seconds_before = self._measured_seconds.get(group, 0.0)
        self._measured_seconds[group] = seconds_before + seconds

    def advanced(self, cell: str, rounds_run: int, seconds: float) -> None:
        """Note how far a running cell has come, and its share of the time since the last note."""
        work = self.work[cell]
        rounds = max(rounds_run - work.rounds_run, 0)
        work.rounds_run = rounds_run
        self._measured_rounds[work.group] += rounds
        self._measured_seconds[work.group] = self._measured_seconds.get(work.group, 0.0) + seconds

    def settle(self, cell: str, state: str, rounds_run: int = 0) -> None:
        """Note that a cell no longer runs: it is done, failed, or stopped after some rounds."""
        self.running = [name for name in self.running if name != cell]
        if state == "done":
            self.done += 1
        elif state == "failed":
            self.failed += 1
        else:
            self.work[cell].rounds_run = rounds_run
            return
        self.work.pop(cell, None)

    def seconds_left(self) -> float | None:
        """Return the estimated seconds left, or None before anything was measured."""
        rounds = self._measured_rounds.total()
        if not rounds:
            return None
        overall_pace = sum(self._measured_seconds.values()) / rounds
        rounds_left: Counter[str] = Counter()
        for work in self.work.values():
            rounds_left[work.group] += work.left
        rounds_left.subtract(self._rounds_of_running)
        seconds = 0.0
        for group, count in rounds_left.items():
            pace = overall_pace
            if group in self._measured_rounds:
                pace = self._measured_seconds[group] / self._measured_rounds[group]
            seconds += max(count, 0) * pace
        return seconds

    def text(self) -> str:
        """Return one line."""
        running = len(self.running)
        counts = [
            f"{self.done} done",
            f"{running} running",
            f"{len(self.work) - running} left",
        ]
        if self.failed:
            counts.append(f"{self.failed} failed")
        if self.current_round:
            counts.append(self.current_round)
        seconds = self.seconds_left()
        if seconds is not None:
            counts.append(f"{duration(seconds)} to go")
        return "cells: " + ", ".join(counts)


class SweepProgress:
    """Shows the status, and listens to the rounds of a pack."""

    def __init__(
        self, status: SweepStatus, quiet: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Choose how to show it: nothing, a line on a terminal, lines elsewhere."""
        self.status = status
        self._clock = clock
        self._plain_lines = not quiet and not sys.stderr.isatty()
        self._live: Live | None = None
        if not quiet and not self._plain_lines:
            self._live = Live(console=Console(stderr=True))
        self._last_line = -LINE_SECONDS
        self._last_round = clock()
        self._total_rounds = 0

    def __enter__(self) -> SweepProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.show(at_once=True)
        if self._live is not None:
            self._live.stop()

    def run(self, cells: Sequence[str]) -> None:
        """Note which cells are running now."""
        self.status.run(cells)
        self.show()

    def begin(self, name: str, done: int, total: int) -> None:
        """A pack starts, or resumes after `done` of `total` rounds."""
        self._last_round = self._clock()
        self._total_rounds = total

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """A round of a pack has ended: one record for each of its cells that is still running."""
        round_end = self._clock()
        group = self.status.work[self.status.running[0]].group
        self.status.measured(group, len(records), round_end - self._last_round)
        self._last_round = round_end
        number = min(record["round"] for record in records) + 1
        self.status.current_round = f"round {number} of {self._total_rounds}"
        self.show()

    def end(self) -> None:
        """A pack has ended or was stopped."""

    def show(self, at_once: bool = False) -> None:
        """Show the status; plain lines only if none was printed a moment ago."""
        if self._live is not None:
            self._live.update(Text(self.status.text()))
        elif self._plain_lines and (at_once or self._clock() - self._last_line >= LINE_SECONDS):
            self._last_line = self._clock()
            print(self.status.text(), file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Return a time in the unit a person would use."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
