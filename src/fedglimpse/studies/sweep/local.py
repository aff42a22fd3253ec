"""Running the packs of a sweep on this machine, one after another."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fedglimpse.config.schema import Config
from fedglimpse.errors import DeviceLost, UserError, reason_of
from fedglimpse.runs.experiment import Stopped, run_together
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.plan import Cell
from fedglimpse.studies.sweep.progress import SweepProgress
from fedglimpse.studies.sweep.stop import Stop


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
        stopped, reason = _run_pack(folder, pack, configs, stop, progress)
        folder.tidy_finished(pack)
        free_memory()
        if reason:
            queue.extendleft(reversed(folder.split_failed_pack(pack, reason)))
        for cell in pack:
            progress.status.settle(cell.id, folder.state(cell), folder.rounds_run(cell))
        if stopped:
            return


def _run_pack(
    folder: SweepFolder,
    pack: Sequence[Cell],
    configs: Mapping[str, Config],
    stop: Stop,
    progress: SweepProgress,
) -> tuple[bool, str]:
    """Run one pack; return whether it was stopped, and what went wrong."""
    runs: list[tuple[Config, Path | None]] = []
    for cell in pack:
        runs.append((configs[cell.id], folder.of(cell)))
    try:
        run_together(runs, resume=True, listener=progress, should_stop=stop.after_round, cores=1)
    except Stopped:
        return True, ""
    except Exception as error:
        if _is_failed_write(error):
            raise
        reason = reason_of(error)
        # Here, because `error` still refers to memory of the GPU, which a lost GPU cannot free.
        check_device(reason)
        return False, reason
    return False, ""


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
            "--lanes 1 if it happens again."
        ) from None
