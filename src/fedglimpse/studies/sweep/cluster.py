"""Running the packs of a sweep on an existing Ray cluster.

A pack is one task. Its cells travel as the files of their run folders; a worker runs them for
`SLICE` seconds at most and returns the files, and the next worker resumes from there, wherever it
is. So no more than one slice is lost if this process or a node dies. Every node needs the same
version of fedglimpse, and the data. Only this module knows Ray.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError, reason_of
from fedglimpse.runs.experiment import Stopped, run_together
from fedglimpse.runs.folder import writing
from fedglimpse.runs.signals import stop_on_signals
from fedglimpse.storage import store
from fedglimpse.storage.checkpoint import COMING, NAME
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.plan import Cell
from fedglimpse.studies.sweep.progress import SweepProgress
from fedglimpse.studies.sweep.stop import RESERVE, Stop
from fedglimpse.version import VERSION

SLICE = 300.0  # seconds a pack runs before its files are returned
RETRIES = 3  # of a pack whose node or process died
POLL = 0.5  # seconds between two looks at the cluster
RETURN_SECONDS = 5.0  # of the budget, kept for files on their way back

Files = Mapping[str, bytes]  # path within a run folder -> content
FIXED = ("config.toml", "environment.json", "partition.json")
RECORDS = "rounds.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class PackTask:
    """What a worker is asked to run."""

    configs: Sequence[Config]
    files: Sequence[Files]  # of each run, as far as it has come
    seconds: float  # how long it may run before it returns the files
    version: str = VERSION


@dataclass(frozen=True)
class PackResult:
    """What a worker returns."""

    files: Sequence[Files]
    rounds: int  # of all runs together
    seconds: float
    reason: str = ""  # why it failed, if it did


def run_task(task: PackTask, asked_to_stop: Callable[[], bool]) -> PackResult:
    """Run a pack in a temporary folder, on the machine that calls this."""
    if task.version != VERSION:
        reason = (
            f"this worker has fedglimpse {VERSION}, the sweep was begun with {task.version}: "
            "install the same version everywhere."
        )
        return PackResult(task.files, 0, 0.0, reason)
    began = time.monotonic()
    stop = Stop(max(task.seconds, 2 * RESERVE))
    rounds = 0
    reason = ""

    def should_stop() -> bool:
        nonlocal rounds
        rounds += 1
        return stop.after_round() or asked_to_stop()

    with tempfile.TemporaryDirectory(prefix="fedglimpse-") as directory:
        folders = [Path(directory) / str(i) for i in range(len(task.configs))]
        for folder, files in zip(folders, task.files, strict=True):
            write_files(files, folder)
        try:
            runs = list(zip(task.configs, folders, strict=True))
            run_together(runs, resume=True, should_stop=should_stop)
        except Stopped:
            pass
        except Exception as error:
            reason = reason_of(error)
        returned_files = list(map(read_files, folders))
    seconds = time.monotonic() - began
    return PackResult(returned_files, rounds * len(task.configs), seconds, reason)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the files of a run folder; none if there is no folder yet."""
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != store.TEMPORARY:
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def write_files(files: Files, folder: Path) -> None:
    """Write files into a run folder so that it can be resumed even if this is interrupted.

    The files that no longer change come first, records before the checkpoint that counts them, and
    the summary last.
    """
    store.make_folder(folder)
    fixed = {name: files[name] for name in FIXED if name in files}
    store.commit(folder, fixed, forget=[RECORDS, SUMMARY])
    for name in sorted(files, key=lambda name: name in (NAME, COMING)):
        if name not in (*FIXED, SUMMARY, store.MANIFEST):
            store.make_folder((folder / name).parent)
            store.write(folder / name, files[name])
    if SUMMARY in files:
        store.commit(folder, {SUMMARY: files[SUMMARY]}, cover=[RECORDS])


class Cluster:
    """A Ray cluster that runs packs."""

    def __init__(
        self, address: str = "auto", *, gpus: float | None = None, cpus: float = 1.0
    ) -> None:
        """Name the cluster; it is joined when there is something to run.

        Args:
            address: as Ray writes it; `auto`: the one this machine belongs to.
            gpus: GPUs that a pack takes, also a fraction of one; None: one if the cluster has any.
            cpus: CPUs that a pack takes.
        """
        self.address = address
        self.gpus = gpus
        self.cpus = cpus
        self.slice = SLICE

    def run_packs(
        self,
        folder: SweepFolder,
        packs: Sequence[Sequence[Cell]],
        configs: Mapping[str, Config],
        stop: Stop,
        progress: SweepProgress,
    ) -> None:
        """Run packs until all are done or `stop` says so."""
        ray = join(self.address)
        try:
            with stop_on_signals(
                stop.request
            ):  # Ray installs handlers of its own when it is joined
                _Session(ray, self, folder, configs, stop, progress).run(packs)
        finally:
            ray.shutdown()


class _Session:
    """One connection to a cluster."""

    def __init__(
        self,
        ray: Any,
        cluster: Cluster,
        folder: SweepFolder,
        configs: Mapping[str, Config],
        stop: Stop,
        progress: SweepProgress,
    ) -> None:
        self.ray = ray
        self.cluster = cluster
        self.folder = folder
        self.configs = configs
        self.stop = stop
        self.progress = progress
        self.stop_flag = ray.remote(num_cpus=0)(_StopFlag).remote()
        gpus = cluster.gpus
        if gpus is None:
            gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
        self.needs = {"CPU": cluster.cpus, "GPU": gpus}
        self._check_fits()
        remote = ray.remote(num_cpus=cluster.cpus, num_gpus=gpus, max_retries=RETRIES)
        self.task = remote(_work)

    def run(self, packs: Sequence[Sequence[Cell]]) -> None:
        """Keep the cluster busy until nothing is left, then wait for the packs still running."""
        queue = deque(map(self.folder.left, packs))
        running: dict[Any, list[Cell]] = {}
        workers_asked_to_stop = False
        while running or (queue and self._may_continue()):
            while queue and len(running) < self.slots() and self._may_continue():
                pack = queue.popleft()
                if pack:
                    running[self._send(pack)] = pack
                    self._show(running)
            if not workers_asked_to_stop and not self._may_continue():
                self.stop_flag.set.remote()
                workers_asked_to_stop = True
            finished: list[Any] = []
            if running:
                finished, _ = self.ray.wait(list(running), timeout=POLL)
            for ref in finished:
                pack = running.pop(ref)
                queue.extendleft(reversed(self._receive(ref, pack)))
                self._show(running)
            self.progress.show()

    def slots(self) -> int:
        """Return how many packs the cluster can run at a time, as it is now."""
        resources = self.ray.cluster_resources()
        counts: list[int] = []
        for name, need in self.needs.items():
            if need:
                counts.append(int(resources.get(name, 0) / need + 1e-6))
        return max(min(counts), 1)

    def _check_fits(self) -> None:
        for node in self.ray.nodes():
            if node["Alive"] and self._fits(node["Resources"]):
                return
        raise UserError(
            f"No node of the Ray cluster has {self.needs['CPU']:g} CPUs and "
            f"{self.needs['GPU']:g} GPUs for a pack: ask for less with --cpus and --gpus.",
            key="--gpus",
        )

    def _fits(self, resources: Mapping[str, float]) -> bool:
        return all(resources.get(name, 0) >= need for name, need in self.needs.items())

    def _may_continue(self) -> bool:
        seconds = self.stop.seconds_left
        has_time = seconds is None or seconds > RETURN_SECONDS + 2 * RESERVE
        return has_time and not self.stop.asked

    def _send(self, pack: Sequence[Cell]) -> Any:
        seconds = self.cluster.slice
        if self.stop.seconds_left is not None:
            seconds = min(seconds, self.stop.seconds_left - RETURN_SECONDS)
        configs: list[Config] = []
        files: list[Files] = []
        for cell in pack:
            configs.append(self.configs[cell.id])
            files.append(read_files(self.folder.of(cell)))
        return self.task.remote(PackTask(configs, files, seconds), self.stop_flag)

    def _receive(self, ref: Any, pack: Sequence[Cell]) -> list[list[Cell]]:
        """Store what a worker returned; return the packs to run next."""
        try:
            result: PackResult = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:  # a node or a process died too often
            last_line = str(error).strip().splitlines()[-1]
            result = PackResult([], 0, 0.0, f"Ray: {type(error).__name__}: {last_line}")
        for cell, files in zip(pack, result.files, strict=False):
            with writing(self.folder.of(cell)):
                write_files(files, self.folder.of(cell))
        self.folder.tidy_finished(pack)
        next_packs = [self.folder.left(pack)]
        if result.reason:
            next_packs = self.folder.split_failed_pack(pack, result.reason)
        status = self.progress.status
        group = status.work[pack[0].id].group
        status.measured(group, result.rounds, result.seconds / self.slots())
        for cell in pack:
            status.settle(cell.id, self.folder.state(cell), self.folder.rounds_run(cell))
        return next_packs

    def _show(self, running: Mapping[Any, Sequence[Cell]]) -> None:
        names: list[str] = []
        for pack in running.values():
            for cell in pack:
                names.append(cell.id)
        self.progress.run(names)


class _StopFlag:
    """An actor on the cluster that tells workers to return early."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self) -> None:
        """Ask all workers to return."""
        self.is_set = True

    def read(self) -> bool:
        """Return whether workers should return."""
        return self.is_set


def _work(task: PackTask, stop_flag: Any) -> PackResult:
    """Run a pack on a worker, reading the flag now and then."""
    import ray

    last_read = time.monotonic()

    def asked_to_stop() -> bool:
        nonlocal last_read
        if time.monotonic() - last_read < POLL:
            return False
        last_read = time.monotonic()
        return bool(ray.get(stop_flag.read.remote()))

    return run_task(task, asked_to_stop)


def join(address: str) -> Any:
    """Connect to a cluster; returns the module `ray`."""
    try:
        import ray
    except ImportError:
        raise UserError(
            "--engine ray needs the package ray, which is not installed: "
            "pip install 'ray[default]', or leave --engine out.",
            key="--engine",
        ) from None
    try:
        _check_listening(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"No Ray cluster answers at --address {address} ({lines[0].rstrip('.')}): start one "
            "with `ray start --head`, or leave --engine out.",
            key="--address",
        ) from None
    return ray


def _check_listening(address: str) -> None:
    """Raise OSError at once if nothing listens; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
