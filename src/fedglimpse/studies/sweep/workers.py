"""Running the packs of a sweep in several processes on this machine.

A pack is a group of cells (one run each) that share a world, so that their clients train together.
Packs are the same as in one process, with one thread each, so the results are the same to the last
bit. Workers write only into the folders of their cells; everything else is written here.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedglimpse.config.schema import Config
from fedglimpse.studies.pool import DIED, Pool
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.local import PackEnd, run_pack, runs_of
from fedglimpse.studies.sweep.plan import Cell
from fedglimpse.studies.sweep.progress import SweepProgress
from fedglimpse.studies.sweep.stop import RESERVE, Stop

RETRIES = 3  # of a pack whose worker died, before it counts as failed
POLL = 0.5  # seconds between two looks at the workers

Pack = Sequence[Cell]


class Workers:
    """Worker processes that run packs: the engine of `--workers N`."""

    def __init__(self, count: int) -> None:
        """Choose how many."""
        self.count = count

    def run_packs(
        self,
        folder: SweepFolder,
        packs: Sequence[Pack],
        configs: Mapping[str, Config],
        stop: Stop,
        progress: SweepProgress,
    ) -> None:
        """Run packs until all are done or `stop` says so; cells that are done are left out."""
        unfinished = [pack for pack in map(folder.left, packs) if pack]
        datasets: dict[str, None] = {}  # in order, each once
        for pack in unfinished:
            datasets[configs[pack[0].id].data.name] = None
        with Pool(min(self.count, len(unfinished)), datasets) as pool:
            _WorkersSession(folder, configs, stop, progress, pool).run(unfinished)


class _WorkersSession:
    """One sweep and its workers."""

    def __init__(
        self,
        folder: SweepFolder,
        configs: Mapping[str, Config],
        stop: Stop,
        progress: SweepProgress,
        pool: Pool,
    ) -> None:
        self.folder = folder
        self.configs = configs
        self.stop = stop
        self.progress = progress
        self.pool = pool
        self.rounds = RoundCounter()
        self.deaths: Counter[str] = Counter()  # of workers in a row, by first cell of the pack
        self.rounds_at_death: dict[str, int] = {}
        self.is_stopping = False
        self._last_look = time.monotonic()

    def run(self, packs: Sequence[Pack]) -> None:
        """Keep the workers busy until nothing is left, then wait for the last of them."""
        queue = deque(packs)
        while self.pool.running or (queue and self._may_start()):
            while queue and self.pool.has_free and self._may_start():
                pack = queue.popleft()
                runs = runs_of(self.folder, pack, self.configs)
                self.pool.start(pack, run_pack, runs, self.stop.seconds_left)
                self._show_running()
            if not self._may_start():
                self.pool.ask_to_stop()
            ended = self.pool.finished(POLL)
            self._look_at_rounds(ended)
            for pack, end in ended:
                queue.extendleft(reversed(self._receive(pack, end)))
                self._show_running()
            self.progress.show()

    def _may_start(self) -> bool:
        seconds = self.stop.seconds_left
        has_time = seconds is None or seconds > 2 * RESERVE
        return has_time and not self.stop.asked and not self.is_stopping

    def _receive(self, pack: Pack, end: PackEnd | None) -> list[list[Cell]]:
        """Take note of what became of a pack; return the packs to run next."""
        self.folder.tidy_finished(pack)
        next_packs: list[list[Cell]] = []
        if end is None:
            next_packs = self._after_death(pack)
        elif end.reason:
            next_packs = self.folder.split_failed_pack(pack, end.reason)
        elif end.stopped:
            self.is_stopping = True
        for cell in pack:
            rounds = self.folder.rounds_run(cell)
            self.progress.status.settle(cell.id, self.folder.state(cell), rounds)
        return next_packs

    def _after_death(self, pack: Pack) -> list[list[Cell]]:
        """Return the pack to try it again, or its halves after several deaths without progress."""
        name = pack[0].id
        rounds = sum(map(self.folder.rounds_run, pack))
        if rounds > self.rounds_at_death.get(name, 0):
            self.deaths[name] = 0
        self.rounds_at_death[name] = rounds
        self.deaths[name] += 1
        if self.deaths[name] <= RETRIES:
            cells = self.folder.left(pack)
            return [cells] if cells else []  # none: it died after the last round of all
        self.deaths[name] = 0
        return self.folder.split_failed_pack(pack, DIED)

    def _look_at_rounds(self, ended: Sequence[tuple[Pack, PackEnd | None]]) -> None:
        """Note how far the running cells are: their records say it, so no worker need report."""
        packs: list[Pack] = [*self.pool.running, *(pack for pack, _ in ended)]
        seconds = time.monotonic() - self._last_look
        self._last_look += seconds
        for pack in packs:
            for cell in pack:
                rounds = self.rounds.of(self.folder.of(cell) / "rounds.jsonl")
                share = seconds / len(packs) / len(pack)
                self.progress.status.advanced(cell.id, rounds, share)

    def _show_running(self) -> None:
        names: list[str] = []
        for pack in self.pool.running:
            names += [cell.id for cell in pack]
        self.progress.run(names)


class RoundCounter:
    """Counts the lines of files that grow, reading only what was added."""

    def __init__(self) -> None:
        self._counted: dict[Path, tuple[int, int]] = {}  # bytes and lines

    def of(self, file: Path) -> int:
        """Return how many lines a file has; 0 if it does not exist."""
        size, lines = self._counted.get(file, (0, 0))
        try:
            with file.open("rb") as content:
                if content.seek(0, 2) < size:  # it was cut back to its checkpoint
                    size = 0
                    lines = 0
                content.seek(size)
                added = content.read()
        except FileNotFoundError:
            return 0
        self._counted[file] = size + len(added), lines + added.count(b"\n")
        return self._counted[file][1]
