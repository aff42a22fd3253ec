"""Worker processes that run packs: kept from pack to pack, replaced when they die.

A worker is an executor of `concurrent.futures` with one process, so that a worker which is killed
takes no other with it. Workers are forked from a process that has imported torch and this package,
so that they begin at once and share its memory. A worker writes into the folders of its runs and
nowhere else, ignores signals that stop the command (it is asked to stop, and does after its round),
and ends when the command does, however that ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_end
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import Any

from fedglimpse.data.shared import SharedDataset, receive, share
from fedglimpse.runs.threads import using_threads
from fedglimpse.studies.sweep.local import PackEnd, Run, free_memory
from fedglimpse.studies.sweep.stop import RESERVE, Stop

GO_ON = 0  # what the parent tells all workers, without a lock that a killed worker could hold
STOP = 1  # after the current round
END = 2  # at once
LOOK_SECONDS = 0.5  # between two looks at that

RunPack = Callable[[Sequence[Run], Callable[[], bool]], PackEnd]

DIED = "its worker process died: killed, or out of memory"


class Pool:
    """A fixed number of workers. As a context manager it ends them: at once after an error."""

    def __init__(self, workers: int, datasets: Iterable[str]) -> None:
        """Start nothing but the process that workers are forked from.

        Args:
            workers: how many.
            datasets: names of those that packs use; they are loaded once, for all workers.
        """
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._message = RawValue("i", GO_ON)
        self._datasets = share(datasets)
        self._free = [self._executor() for _ in range(workers)]
        self._running: dict[Future[PackEnd], tuple[ProcessPoolExecutor, Any]] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._message.value = STOP if error is None else END
        for executor in [*self._free, *(executor for executor, _ in self._running.values())]:
            executor.shutdown()

    @property
    def has_free(self) -> bool:
        """True where another pack can start."""
        return bool(self._free)

    @property
    def running(self) -> list[Any]:
        """The names of the packs that are running."""
        return [name for _, name in self._running.values()]

    def start(
        self, name: Any, run: RunPack, runs: Sequence[Run], seconds: float | None = None
    ) -> None:
        """Start a pack in a free worker.

        Args:
            name: returned by `finished`.
            run: the function that runs it, of a module.
            runs: configurations and run folders.
            seconds: that it may take until it must have stopped; None: no limit.
        """
        executor = self._free.pop(0)
        try:
            future = executor.submit(_work, run, list(runs), seconds)
        except BrokenProcessPool:  # it was killed while it had nothing to do
            executor.shutdown()
            executor = self._executor()
            future = executor.submit(_work, run, list(runs), seconds)
        self._running[future] = (executor, name)

    def finished(self, timeout: float) -> list[tuple[Any, PackEnd | None]]:
        """Wait until a pack has ended, or for `timeout` seconds.

        Returns:
            The names of packs that have ended, and how; None where the worker died.

        Raises:
            Exception: what the function of a pack raised.
        """
        ended, _ = wait(self._running, timeout, FIRST_COMPLETED)
        results: list[tuple[Any, PackEnd | None]] = []
        for future in ended:
            executor, name = self._running.pop(future)
            try:
                results.append((name, future.result()))
            except BrokenProcessPool:
                executor.shutdown()
                executor = self._executor()
                results.append((name, None))
            finally:
                self._free.append(executor)
        return results

    def ask_to_stop(self) -> None:
        """Ask all workers to stop after their current round."""
        self._message.value = STOP

    def _executor(self) -> ProcessPoolExecutor:
        """Return a worker; its process starts with its first pack."""
        arguments = (self._message, self._datasets, Path.cwd())
        return ProcessPoolExecutor(
            1, mp_context=self._context, initializer=_begin, initargs=arguments
        )


_message: Any = None  # in a worker: what the parent tells it


def _begin(message: Any, datasets: Sequence[SharedDataset], folder: Path) -> None:
    """Make this process a worker."""
    global _message
    _message = message
    for stopping in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stopping, signal.SIG_IGN)
    os.chdir(folder)  # where the user's own code is looked for
    threading.Thread(target=_end_when_told, daemon=True).start()
    receive(datasets)


def _end_when_told() -> None:
    """End this process as soon as the parent says so or is gone: a run may be killed any time."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while _message.value != END:
        if wait_for_end([parent.sentinel], LOOK_SECONDS):
            break
    os._exit(1)


def _work(run: RunPack, runs: Sequence[Run], seconds: float | None) -> PackEnd:
    """Run a pack in this worker."""
    stop = Stop(None if seconds is None else max(seconds, 2 * RESERVE))

    def should_stop() -> bool:
        return stop.after_round() or _message.value != GO_ON

    try:
        with using_threads(1):
            return run(runs, should_stop)
    finally:
        free_memory()
