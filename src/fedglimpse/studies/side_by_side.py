"""Independent runs in several processes: each in a folder of its own, with one display for all."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.runs.experiment import Stopped
from fedglimpse.runs.folder import RunFolder
from fedglimpse.runs.progress import Listener
from fedglimpse.runs.threads import available_cores
from fedglimpse.studies.pool import DIED, Pool
from fedglimpse.studies.sweep.local import Run, run_or_raise

POLL = 0.2  # seconds between two looks at the workers
RETRIES = 3  # of a run whose worker died


def run_side_by_side(
    runs: Sequence[Run],
    workers: int,
    listener: Listener,
    should_stop: Callable[[], bool],
) -> list[list[dict[str, Any]]]:
    """Run or resume each of several runs, so many at a time; return their records.

    Their folders must have been checked. The cores are divided among the workers.

    Raises:
        Stopped: where `should_stop` said so; all can be resumed.
        UserError: for a run that cannot go on, or whose process keeps dying.
    """
    names = {config.data.name: None for config, _ in runs}
    run = partial(run_or_raise, cores=max(available_cores() // workers, 1))
    queue = deque(runs)
    deaths: Counter[Path] = Counter()
    progress = [_Progress(config, path) for config, path in runs]
    is_stopped = False
    rounds_done = sum(one.rounds_done for one in progress)
    listener.begin(f"{len(runs)} runs", rounds_done, sum(config.rounds for config, _ in runs))
    try:
        with Pool(workers, names) as pool:
            while queue or pool.running:
                if should_stop():
                    is_stopped = is_stopped or bool(queue)
                    queue.clear()
                    pool.ask_to_stop()
                while queue and pool.has_free:
                    one = queue.popleft()
                    pool.start(one, run, [one])
                for one, end in pool.finished(POLL):
                    if end is None:
                        deaths[one[1]] += 1
                        queue.append(_again(one, deaths[one[1]]))
                    else:
                        is_stopped = is_stopped or end.stopped
                for one_progress in progress:
                    for records in one_progress.new_rounds():
                        listener.round(records)
    finally:
        listener.end()
    if is_stopped:
        raise Stopped
    return [RunFolder(path).read() for _, path in runs]


def _again(run: Run, deaths: int) -> Run:
    """Return a run whose worker died, or raise UserError if that happened too often."""
    config, path = run
    if deaths > RETRIES:
        raise UserError(
            f"method={config.method} in {path} cannot be run: {DIED}. Use --workers 1 to see why."
        )
    return run


class _Progress:
    """Reads from its records how far a run is, whoever runs it."""

    def __init__(self, config: Config, path: Path) -> None:
        self._records = RunFolder(path).rounds
        self._lanes = len(config.seeds)
        self._bytes_read = 0
        self.rounds_done = 0
        for _ in self.new_rounds():
            pass

    def new_rounds(self) -> list[list[dict[str, Any]]]:
        """Return the records of every round that was written since the last call."""
        if not self._records.exists():
            return []
        with self._records.open("rb") as file:
            if file.seek(0, 2) < self._bytes_read:  # it was cut back to its checkpoint
                self._bytes_read = 0
            file.seek(self._bytes_read)
            added = file.read()
        complete = added[: added.rfind(b"\n") + 1]
        lines = complete.splitlines()
        whole_rounds = len(lines) // self._lanes
        rounds: list[list[dict[str, Any]]] = []
        for first in range(0, whole_rounds * self._lanes, self._lanes):
            of_round = lines[first : first + self._lanes]
            self._bytes_read += sum(map(len, of_round)) + self._lanes
            records = [json.loads(line) for line in of_round]
            if records[0]["round"] >= self.rounds_done:  # not one that was repeated
                self.rounds_done += 1
                rounds.append(records)
        return rounds
