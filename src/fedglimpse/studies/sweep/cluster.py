"""A pack on its way to another machine and home again.

Cells travel as the files of their run folders. A worker plays for a while and sends back what it
has; the next worker goes on from there, wherever it is.

Playing a sweep on an existing Ray cluster: packs go out, run folders come home.

Only this module knows Ray. A pack is one task; it comes home after `SLICE` seconds at the latest,
so that no more than that is lost when this process or a node dies. Every node needs the same
version of fedglimpse, and the data.
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
from fedglimpse.storage.checkpoint import COMING, NAME
from fedglimpse.studies.sweep.failures import split_or_blame
from fedglimpse.studies.sweep.folder import SweepFolder
from fedglimpse.studies.sweep.plan import Cell
from fedglimpse.studies.sweep.progress import SweepProgress
from fedglimpse.studies.sweep.stop import RESERVE, Stop
from fedglimpse.version import VERSION

Files = Mapping[str, bytes]  # path within a run folder -> content
ORDER = {"config.toml": 0, NAME: 2, COMING: 2, "summary.json": 3}  # everything else: 1


@dataclass(frozen=True)
class Parcel:
    """What a worker is asked to play."""

    configs: Sequence[Config]
    files: Sequence[Files]  # of each run, as far as it was played
    seconds: float  # how long it may play before it sends back what it has
    version: str = VERSION


@dataclass(frozen=True)
class Played:
    """What came of a parcel."""

    files: Sequence[Files]
    rounds: int  # played, all runs together
    seconds: float
    reason: str = ""  # why it failed, if it did


def play_parcel(parcel: Parcel, asked_to_stop: Callable[[], bool]) -> Played:
    """Play the runs of a parcel in a folder of its own, on the machine that runs this."""
    began, rounds, reason = time.monotonic(), 0, ""
    if parcel.version != VERSION:
        reason = (
            f"this worker has fedglimpse {VERSION}, the sweep was begun with {parcel.version}: "
            "install the same version everywhere."
        )
        return Played(parcel.files, 0, 0.0, reason)
    stop = Stop(max(parcel.seconds, 2 * RESERVE))

    def over() -> bool:
        nonlocal rounds
        rounds += 1
        return stop.after_round() or asked_to_stop()

    with tempfile.TemporaryDirectory(prefix="fedglimpse-") as place:
        folders = [Path(place) / str(i) for i in range(len(parcel.configs))]
        for folder, files in zip(folders, parcel.files, strict=True):
            unpack(files, folder)
        try:
            runs = list(zip(parcel.configs, folders, strict=True))
            run_together(runs, resume=True, should_stop=over)
        except Stopped:
            pass
        except Exception as error:
            reason = reason_of(error)
        files_now = [pack_up(folder) for folder in folders]
    played = rounds * len(parcel.configs)
    return Played(files_now, played, time.monotonic() - began, reason)


def pack_up(folder: Path) -> dict[str, bytes]:
    """Return the files of a run folder; none where there is no folder yet."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != ".part"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def unpack(files: Files, folder: Path) -> None:
    """Write files into a run folder so that it can be gone on with, wherever this is cut.

    The configuration comes first, records before the checkpoint that counts them, and the summary
    last.
    """
    for name in sorted(files, key=lambda n: ORDER.get(n, 1)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_bytes(files[name])
        part.replace(path)


SLICE = 300.0  # seconds a pack plays before it comes home
RETRIES = 3  # of a pack whose node or process died
POLL = 0.5  # seconds between two looks at the cluster
WAY_HOME = 5.0  # seconds of the budget kept for what is on its way


class Cluster:
    """A Ray cluster to play on."""

    def __init__(
        self, address: str = "auto", *, gpus: float | None = None, cpus: float = 1.0
    ) -> None:
        """Name the cluster; it is joined when there is something to play.

        Args:
            address: as Ray writes it; `auto`: the one this machine belongs to.
            gpus: GPUs that a pack takes, also a part of one; None: one if the cluster has any.
            cpus: CPUs that a pack takes.
        """
        self.address, self.gpus, self.cpus, self.slice = address, gpus, cpus, SLICE

    def play(
        self,
        folder: SweepFolder,
        packs: Sequence[Sequence[Cell]],
        configs: Mapping[str, Config],
        stop: Stop,
        progress: SweepProgress,
    ) -> None:
        """Play packs until all are done or `stop` says so."""
        ray = join(self.address)
        try:
            with stop_on_signals(stop.request):  # joining Ray has installed other handlers
                _Session(ray, self, folder, configs, stop, progress).play(packs)
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
        self.ray, self.cluster, self.folder, self.configs = ray, cluster, folder, configs
        self.stop, self.progress = stop, progress
        self.flag = ray.remote(num_cpus=0)(_Flag).remote()
        gpus = cluster.gpus
        if gpus is None:
            gpus = 1.0 if ray.cluster_resources().get("GPU", 0) else 0.0
        self.needs = {"CPU": cluster.cpus, "GPU": gpus}
        self._check_fits()
        self.task = ray.remote(num_cpus=cluster.cpus, num_gpus=gpus, max_retries=RETRIES)(_work)

    def play(self, packs: Sequence[Sequence[Cell]]) -> None:
        """Keep the cluster busy until nothing is left, then fetch what is still out."""
        queue = deque(self.folder.left(pack) for pack in packs)
        out: dict[Any, list[Cell]] = {}
        told = False
        while out or (queue and self._may_go_on()):
            while queue and len(out) < self.slots() and self._may_go_on():
                pack = queue.popleft()
                if pack:
                    out[self._send(pack)] = pack
                    self._show(out)
            if not told and not self._may_go_on():
                self.flag.set.remote()
                told = True
            home, _ = self.ray.wait(list(out), timeout=POLL) if out else ([], [])
            for ref in home:
                pack = out.pop(ref)
                queue.extendleft(reversed(self._receive(ref, pack)))
                self._show(out)
            self.progress.show()

    def slots(self) -> int:
        """Return how many packs the cluster can play at a time, as it is now."""
        there = self.ray.cluster_resources()
        counts = [int(there.get(name, 0) / n + 1e-6) for name, n in self.needs.items() if n]
        return max(min(counts), 1)

    def _check_fits(self) -> None:
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(n.get(k, 0) >= v for k, v in self.needs.items()) for n in nodes):
            raise UserError(
                f"No node of the Ray cluster has {self.needs['CPU']:g} CPUs and "
                f"{self.needs['GPU']:g} GPUs for a pack: ask for less with --cpus and --gpus."
            )

    def _may_go_on(self) -> bool:
        left = self.stop.left
        return not self.stop.asked and (left is None or left > WAY_HOME + 2 * RESERVE)

    def _send(self, pack: Sequence[Cell]) -> Any:
        left = self.stop.left
        seconds = self.cluster.slice if left is None else min(self.cluster.slice, left - WAY_HOME)
        files = [pack_up(self.folder.of(cell)) for cell in pack]
        parcel = Parcel([self.configs[cell.id] for cell in pack], files, seconds)
        return self.task.remote(parcel, self.flag)

    def _receive(self, ref: Any, pack: Sequence[Cell]) -> list[list[Cell]]:
        """Store what came home; returns what is to be played next."""
        try:
            played: Played = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:  # a node or a process died too often
            last = str(error).strip().splitlines()[-1]
            played = Played([], 0, 0.0, f"Ray: {type(error).__name__}: {last}")
        for cell, files in zip(pack, played.files, strict=False):
            with writing(self.folder.of(cell)):
                unpack(files, self.folder.of(cell))
            if self.folder.state(cell) == "done":
                self.folder.tidy(cell)
        again = [self.folder.left(pack)]
        if played.reason:
            again = split_or_blame(self.folder, pack, played.reason)
        tally = self.progress.tally
        tally.measured(tally.work[pack[0].id].group, played.rounds, played.seconds / self.slots())
        for cell in pack:
            tally.settle(cell.id, self.folder.state(cell), self.folder.played(cell))
        return again

    def _show(self, out: Mapping[Any, Sequence[Cell]]) -> None:
        self.progress.run([cell.id for pack in out.values() for cell in pack])


class _Flag:
    """Lives on the cluster and tells workers to come home early."""

    def __init__(self) -> None:
        self.up = False

    def set(self) -> None:
        """Call everyone home."""
        self.up = True

    def read(self) -> bool:
        """True where workers should come home."""
        return self.up


def _work(parcel: Parcel, flag: Any) -> Played:
    """Play a parcel on a worker, looking at the flag now and then."""
    import ray

    last = time.monotonic()

    def called_home() -> bool:
        nonlocal last
        if time.monotonic() - last < POLL:
            return False
        last = time.monotonic()
        return bool(ray.get(flag.read.remote()))

    return play_parcel(parcel, called_home)


def join(address: str) -> Any:
    """Connect to a cluster; returns the module `ray`."""
    try:
        import ray
    except ImportError:
        raise UserError(
            "--engine ray needs the package ray, which is not installed: "
            "pip install 'ray[default]', or leave --engine out."
        ) from None
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(
            f"No Ray cluster answers at --address {address} ({first}): start one with "
            "`ray start --head`, or leave --engine out."
        ) from None
    return ray


def _knock(address: str) -> None:
    """Raise OSError at once where nobody listens; Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
