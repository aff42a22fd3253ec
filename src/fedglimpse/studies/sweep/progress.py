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

LINE_SECONDS = 5.0  # plain lines come no faster than this


@dataclass
class Work:
    """What is left to do in one cell."""

    group: str  # cells of a group take about the same time for a round
    rounds: int
    played: int

    @property
    def left(self) -> int:
        """Rounds left."""
        return max(self.rounds - self.played, 0)


class Tally:
    """Counts cells and foresees the end from the pace of every group so far."""

    def __init__(self, work: Mapping[str, Work], done: int, failed: int) -> None:
        """Start counting.

        Args:
            work: of the cells that are left, by id.
            done: cells that were done before.
            failed: cells that failed before.
        """
        self.work, self.done, self.failed = dict(work), done, failed
        self.running: list[str] = []
        self.rounds = ""  # which rounds are being played
        self._ahead: Counter[str] = Counter()  # rounds of running cells, by group
        self._rounds: Counter[str] = Counter()  # rounds measured, by group
        self._seconds: dict[str, float] = {}  # and what they took

    def run(self, cells: Sequence[str]) -> None:
        """These cells are being played now."""
        self.running, self.rounds = list(cells), ""
        self._ahead.clear()

    def measured(self, group: str, rounds: int, seconds: float) -> None:
        """So many rounds of running cells took so long."""
        self._ahead[group] += rounds
        self._rounds[group] += rounds
        self._seconds[group] = self._seconds.get(group, 0.0) + seconds

    def settle(self, cell: str, state: str, played: int = 0) -> None:
        """A cell is no longer played: it is done, failed, or stopped after `played` rounds."""
        self.running = [name for name in self.running if name != cell]
        if state in ("done", "failed"):
            self.work.pop(cell, None)
            self.done, self.failed = self.done + (state == "done"), self.failed + (state != "done")
        else:
            self.work[cell].played = played

    def eta(self) -> float | None:
        """Return the seconds left, or None before anything was measured."""
        rounds = sum(self._rounds.values())
        if not rounds:
            return None
        overall = sum(self._seconds.values()) / rounds
        left = Counter({g: -n for g, n in self._ahead.items()})
        for work in self.work.values():
            left[work.group] += work.left
        pace = {g: self._seconds[g] / n for g, n in self._rounds.items()}
        return sum(max(n, 0) * pace.get(g, overall) for g, n in left.items())

    def text(self) -> str:
        """Return one line."""
        running = len(self.running)
        parts = [f"{self.done} done", f"{running} running", f"{len(self.work) - running} left"]
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [self.rounds] if self.rounds else []
        eta = self.eta()
        parts += [] if eta is None else [f"{spell(eta)} to go"]
        return "cells: " + ", ".join(parts)


class SweepProgress:
    """Shows a tally, and listens to the rounds of a pack."""

    def __init__(
        self, tally: Tally, quiet: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Choose how to show it: nothing, a line on a terminal, lines elsewhere."""
        self.tally, self._clock = tally, clock
        self._lines = not quiet and not sys.stderr.isatty()
        self._live = None if quiet or self._lines else Live(console=Console(stderr=True))
        self._shown = -LINE_SECONDS
        self._last, self._total = clock(), 0

    def __enter__(self) -> SweepProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.show(now=True)
        if self._live is not None:
            self._live.stop()

    def run(self, cells: Sequence[str]) -> None:
        """These cells are being played."""
        self.tally.run(cells)
        self.show()

    def begin(self, name: str, done: int, total: int) -> None:
        """A pack is ready to play."""
        self._last, self._total = self._clock(), total

    def round(self, records: Sequence[dict[str, Any]]) -> None:
        """A round of a pack has ended: one record for each of its cells that was still going."""
        now = self._clock()
        group = self.tally.work[self.tally.running[0]].group
        self.tally.measured(group, len(records), now - self._last)
        self._last = now
        self.tally.rounds = f"round {min(r['round'] for r in records) + 1} of {self._total}"
        self.show()

    def end(self) -> None:
        """A pack has ended or was stopped."""

    def show(self, now: bool = False) -> None:
        """Show the tally, if it was not shown a moment ago."""
        if self._live is not None:
            self._live.update(Text(self.tally.text()))
        elif self._lines and (now or self._clock() - self._shown >= LINE_SECONDS):
            self._shown = self._clock()
            print(self.tally.text(), file=sys.stderr, flush=True)


def spell(seconds: float) -> str:
    """Return a time in the unit a person would use."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
