"""Playing a sweep on this machine, pack after pack."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from fedglimpse.config.schema import Config
from fedglimpse.errors import DeviceLost, reason_of
from fedglimpse.runs.experiment import Stopped, run_together
from fedglimpse.studies.sweep.failures import concerns_the_folder, split_or_blame
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.plan import Cell
from fedglimpse.studies.sweep.progress import SweepProgress
from fedglimpse.studies.sweep.stop import Stop


def play(
    folder: SweepFolder,
    packs: Sequence[Sequence[Cell]],
    configs: Mapping[str, Config],
    stop: Stop,
    progress: SweepProgress,
) -> None:
    """Play packs until all are done or `stop` says so; what is done already is left out."""
    queue = deque(folder.left(pack) for pack in packs)
    while queue:
        pack = queue.popleft()
        if not pack:
            continue
        if not stop.may_begin():
            return
        progress.run([cell.id for cell in pack])
        stopped, reason = _play_pack(folder, pack, configs, stop, progress)
        for cell in pack:
            if folder.state(cell) == "done":
                folder.tidy(cell)
        free_memory()
        if reason:
            queue.extendleft(reversed(split_or_blame(folder, pack, reason)))
        for cell in pack:
            progress.tally.settle(cell.id, folder.state(cell), folder.played(cell))
        if stopped:
            return


def _play_pack(
    folder: SweepFolder,
    pack: Sequence[Cell],
    configs: Mapping[str, Config],
    stop: Stop,
    progress: SweepProgress,
) -> tuple[bool, str]:
    """Play one pack; returns whether it was stopped, and what went wrong."""
    runs = [(configs[cell.id], folder.of(cell)) for cell in pack]
    try:
        run_together(runs, resume=True, listener=progress, should_stop=stop.after_round)
    except Stopped:
        return True, ""
    except Exception as error:
        if concerns_the_folder(error):
            raise
        reason = reason_of(error)
        check_device(reason)  # here, where `error` still holds what cannot be freed then
        return False, reason
    return False, ""


def free_memory() -> None:
    """Let go of what the last pack held, on the GPU too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_device(reason: str) -> None:
    """Raise DeviceLost where a GPU answers no more: that ends the sweep and blames no cell."""
    if not torch.cuda.is_available():
        return
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except torch.cuda.OutOfMemoryError:
        return
    except RuntimeError:
        raise DeviceLost(
            f"The GPU stopped working after '{reason}': run the same command again to go on, with "
            "--lanes 1 if it comes back."
        ) from None
