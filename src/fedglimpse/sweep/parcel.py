"""A pack on its way to another machine and home again.

Cells travel as the files of their run folders. A worker plays for a while and sends back what it
has; the next worker goes on from there, wherever it is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedglimpse.checkpoint import COMING, NAME
from fedglimpse.config import Config
from fedglimpse.experiment import Stopped, run_together
from fedglimpse.sweep.failures import reason_of
from fedglimpse.sweep.stop import RESERVE, Stop
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
