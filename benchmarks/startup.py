"""Seconds from the shell prompt to an answer, and to the first round: python benchmarks/startup.py.

Medians of ten on one core. To compare with another version of the code, name its `src`:

    python benchmarks/startup.py ../other/src

The two then take turns, so that whatever else the machine does slows both.
"""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[1] / "src"
REPETITIONS = 10
LONGEST_WAIT = 60.0  # seconds
POLL = 0.002  # seconds between two looks at the records
ANSWERS = (
    "--version",
    "--help",
    "run --help",
    "methods",
    "runn",
    "run rouns=3",
    "run method=fedavgg",
    "run data.name=digit",
    "run data.alpha=0",
    "compare fedavg fedavgg",
)
RUN = "run data.name=digits rounds=100000 -q"


def start(command: str, source: Path) -> subprocess.Popen[bytes]:
    """Start `fedglimpse` on the first core that this process may use."""
    core = min(os.sched_getaffinity(0))
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    words = ["taskset", "-c", str(core), sys.executable, "-m", "fedglimpse", *shlex.split(command)]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@dataclass(frozen=True)
class Duration:
    """How long something took."""

    wall: float  # seconds
    cpu: float  # seconds, which other work on the machine does not lengthen much


Measure = Callable[[str, Path], Duration]


def ended(process: subprocess.Popen[bytes], began: float) -> Duration:
    """Wait for the end of a process that is not waited for yet."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Duration(time.perf_counter() - began, cpu)


def answer(command: str, source: Path = SOURCE) -> Duration:
    """Return how long a command takes."""
    began = time.perf_counter()
    return ended(start(command, source), began)


def first_round(command: str, source: Path = SOURCE) -> Duration:
    """Return how long it takes until a run has written its first record, and end the run."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "run" / "rounds.jsonl"
        began = time.perf_counter()
        process = start(f"{command} --out {records.parent}", source)
        while not (records.exists() and records.stat().st_size):
            if time.perf_counter() - began > LONGEST_WAIT:
                process.kill()
                raise RuntimeError(f"{command} wrote no record in {LONGEST_WAIT:.0f} s")
            time.sleep(POLL)
        wall = time.perf_counter() - began
        process.kill()
        return Duration(wall, ended(process, began).cpu)


def typical(durations: Sequence[Duration]) -> Duration:
    """Return the medians."""
    walls = [duration.wall for duration in durations]
    return Duration(median(walls), median(duration.cpu for duration in durations))


def main() -> None:
    """Print a table with a column for each version."""
    sources = [SOURCE, *map(Path, sys.argv[1:])]
    cases: list[tuple[str, str, Measure]] = [(f"`{word}`", word, answer) for word in ANSWERS]
    cases.append((f"first round of `{RUN}`", RUN, first_round))
    print(f"| command | {' | '.join(str(source) for source in sources)} |")
    print("|---" * (1 + len(sources)) + "|")
    for title, command, measure in cases:
        durations: dict[Path, list[Duration]] = {source: [] for source in sources}
        for _ in range(REPETITIONS):
            for source in sources:
                durations[source].append(measure(command, source))
        cells: list[str] = []
        for source in sources:
            duration = typical(durations[source])
            cells.append(f"{duration.wall:.2f} s, {duration.cpu:.2f} s of CPU")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
