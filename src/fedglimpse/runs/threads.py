"""How many threads torch uses for a run on a CPU: decided once, when the run is built.

On several OpenMP threads the operations of a small model are so short that the threads spend their
time waiting for each other, and beside another busy process a round takes five to ten times as
long. So the number follows from the model, by what `benchmarks/threads.py` measured, and not from
the machine alone. It is stored in environment.json, and a resumed run uses it again, because sums
are rounded differently with another number of threads.

In falling priority: `engine.threads`, the number stored in a run that is resumed, OMP_NUM_THREADS,
the model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from fedglimpse.config.schema import EngineConfig
from fedglimpse.runs.folder import stored_environment
from fedglimpse.simulation.trainers.choose import has_convolutions

LARGE_MODEL = 3_000_000  # parameters of a dense model for which threads pay
MOST_THREADS = 8  # beyond two cores nothing was measured
VARIABLE = "OMP_NUM_THREADS"
CGROUPS = Path("/sys/fs/cgroup")
CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")


def available_cores() -> int:
    """Return how many cores this process may use: those of the machine, its affinity or quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota = cgroup_cores()
    return cores if quota is None else min(cores, max(int(quota), 1))


def cgroup_cores(root: Path = CGROUPS, membership: Path = CGROUPS_OF_PROCESS) -> float | None:
    """Return how many cores the control groups of this process allow; None: no limit.

    A group's limit holds for all groups below it. Inside a container the folders of the groups
    above its own do not exist, and its own is the root.

    Args:
        root: where control groups are mounted.
        membership: lists the groups of this process.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits: list[float] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (root, root / "cpu", root / "cpu,cpuacct"):
            for folder in _with_parents(mount, group):
                limits += _limits_of(folder)
    return min(limits) if limits else None


def _with_parents(mount: Path, group: str) -> list[Path]:
    """Return the folder of a group and of every group above it."""
    folders = [mount]
    for name in Path(group).parts:
        if name not in ("/", ".."):
            folders.append(folders[-1] / name)
    return folders


def _limits_of(folder: Path) -> list[float]:
    """Return the limit of one group, as versions 1 and 2 write it."""
    limits: list[float] = []
    quota_and_period = _words(folder / "cpu.max")
    if len(quota_and_period) != 2:
        quota_and_period = _words(folder / "cpu.cfs_quota_us") + _words(
            folder / "cpu.cfs_period_us"
        )
    if len(quota_and_period) == 2 and all(word.isdigit() for word in quota_and_period):
        quota = int(quota_and_period[0])  # "max" and "-1": no limit
        period = int(quota_and_period[1])
        if quota and period:
            limits.append(quota / period)
    return limits


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []


def choose_threads(model: nn.Module, cores: int) -> int:
    """Return how many threads pay for a model, of at most `cores`.

    Measured with one, four and sixteen lanes: for dense layers one thread, whatever the lanes.
    """
    if has_convolutions(model) or _num_parameters(model) >= LARGE_MODEL:
        return min(cores, MOST_THREADS)
    return 1


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def threads_of_run(
    settings: EngineConfig,
    model: nn.Module,
    run_folders: Iterable[Path] = (),
    most: int | None = None,
) -> int:
    """Return the number of threads of a run on a CPU.

    Args:
        settings: its `engine.*`.
        model: that clients train.
        run_folders: of the runs in one world; any that is resumed has stored its number.
        most: cores that the run may use; None: those that are available.
    """
    if isinstance(settings.threads, int):
        return settings.threads
    for folder in run_folders:
        stored = stored_threads(folder)
        if stored is not None:
            return stored
    return automatic_threads(model, most)


def automatic_threads(model: nn.Module, most: int | None = None) -> int:
    """Return the number that OMP_NUM_THREADS or the model asks for; at most `most`."""
    asked = os.environ.get(VARIABLE, "").partition(",")[0].strip()
    if asked.isdigit() and int(asked):
        return int(asked) if most is None else min(int(asked), most)
    return choose_threads(model, available_cores() if most is None else most)


def stored_threads(folder: Path) -> int | None:
    """Return with how many threads a run was begun; None: it was not."""
    threads = stored_environment(folder).get("threads")
    return threads if isinstance(threads, int) and threads > 0 else None


@contextmanager
def using_threads(threads: int | None) -> Iterator[None]:
    """Let torch use so many threads in the block; None: as many as before."""
    if threads is None:
        yield
        return
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
