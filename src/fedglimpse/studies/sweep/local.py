"""Running the packs of a sweep on this machine, one after another.

A pack is a group of cells (one run each) that share a world, so that their clients train together.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from fedglimpse.config.schema import Config
from fedglimpse.errors import DeviceLost, UserError, reason_of
from fedglimpse.runs.experiment import Stopped, run_together
from fedglimpse.runs.folder import RunFolder
from fedglimpse.runs.progress import Listener
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.plan import Cell
from fedglimpse.studies.sweep.progress import SweepProgress
from fedglimpse.studies.sweep.stop import Stop

# A pack always computes with one thread of a CPU: more threads change the last bits of sums, so
# results would depend on the machine. Cores are used by running several packs side by side.
CORES_OF_PACK = 1
ORPHAN_SECONDS = 30.0  # after so long a worker whose sweep was killed has ended, too

Run = tuple[Config, Path]  # a configuration and its run folder


@dataclass(frozen=True)
class PackEnd:
    """How a pack ended; by default all of its rounds are done."""

    stopped: bool = False  # it was asked to, and can be resumed
    reason: str = ""  # why it failed


def run_packs(
    folder: SweepFolder,
    packs: Sequence[Sequence[Cell]],
    configs: Mapping[str, Config],
    stop: Stop,
    progress: SweepProgress,
) -> None:
    """Run packs until all are done or `stop` says so; cells that are done are left out."""
    queue = deque(map(folder.left, packs))
    while queue:
        pack = queue.popleft()
        if not pack:
            continue
        if not stop.may_begin():
            return
        progress.run([cell.id for cell in pack])
        end = run_pack(runs_of(folder, pack, configs), stop.after_round, progress)
        folder.tidy_finished(pack)
        free_memory()
        if end.reason:
            queue.extendleft(reversed(folder.split_failed_pack(pack, end.reason)))
        for cell in pack:
            progress.status.settle(cell.id, folder.state(cell), folder.rounds_run(cell))
        if end.stopped:
            return


def runs_of(folder: SweepFolder, pack: Sequence[Cell], configs: Mapping[str, Config]) -> list[Run]:
    """Return the runs of a pack of cells."""
    return [(configs[cell.id], folder.of(cell)) for cell in pack]


def run_pack(
    runs: Sequence[Run], should_stop: Callable[[], bool], listener: Listener | None = None
) -> PackEnd:
    """Run a pack from where it is, alone in its run folders.

    Raises:
        UserError: where the folders cannot be used, which is no run's fault.
    """
    with _alone(runs):
        try:
            return _run(runs, should_stop, listener, CORES_OF_PACK)
        except Exception as error:
            if _is_failed_write(error):
                raise
            reason = reason_of(error)
            # Checked while `error` is alive: it holds tensors, which a lost GPU cannot free.
            check_device(reason)
            return PackEnd(reason=reason)


def run_or_raise(runs: Sequence[Run], should_stop: Callable[[], bool], cores: int) -> PackEnd:
    """Run a pack as `run_pack` does, but raise what goes wrong.

    Args:
        runs: that share a world.
        should_stop: asked after every round.
        cores: of a CPU that the pack may use.
    """
    with _alone(runs):
        return _run(runs, should_stop, None, cores)


def _run(
    runs: Sequence[Run], should_stop: Callable[[], bool], listener: Listener | None, cores: int
) -> PackEnd:
    try:
        run_together(runs, resume=True, listener=listener, should_stop=should_stop, cores=cores)
    except Stopped:
        return PackEnd(stopped=True)
    return PackEnd()


@contextmanager
def _alone(runs: Sequence[Run]) -> Iterator[None]:
    """Lock the folders of runs."""
    with ExitStack() as locks:
        for _, path in runs:
            locks.enter_context(RunFolder(path).alone(wait=ORPHAN_SECONDS))
        yield


def _is_failed_write(error: BaseException) -> bool:
    """Return whether the sweep's folder can no longer be written, which is no cell's fault."""
    return isinstance(error, UserError) and isinstance(error.__cause__, OSError | RuntimeError)


def free_memory() -> None:
    """Free what the last pack held, on the GPU too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_device(reason: str) -> None:
    """Raise DeviceLost if a GPU no longer answers: that ends the sweep and blames no cell."""
    if not torch.cuda.is_available():
        return
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except torch.cuda.OutOfMemoryError:
        return
    except RuntimeError:
        raise DeviceLost(
            f"The GPU stopped working after '{reason}': rerun the same command to resume, with "
            "--set engine.max_jobs=8 if it happens again."
        ) from None
