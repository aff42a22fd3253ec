"""Seconds from the shell prompt to an answer, and to the first round: python benchmarks/startup.py.

Medians of ten on one core. To compare with another version of the code, name its `src`:

    python benchmarks/startup.py ../other/src

The two then take turns, so that whatever else the machine does slows both.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

SOURCE = Path(__file__).parents[1] / "src"
REPETITIONS = 10
LONGEST_WAIT = 60.0  # seconds
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


def seconds(command: str, source: Path = SOURCE) -> float:
    """Return how long a command takes."""
    began = time.perf_counter()
    start(command, source).wait()
    return time.perf_counter() - began


def seconds_to_first_round(command: str, source: Path = SOURCE) -> float:
    """Return how long it takes until a run has written its first record, and end the run."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "run" / "rounds.jsonl"
        began = time.perf_counter()
        process = start(f"{command} --out {records.parent}", source)
        while not (records.exists() and records.stat().st_size):
            if process.poll() is not None or time.perf_counter() - began > LONGEST_WAIT:
                raise RuntimeError(f"{command} wrote no record")
            time.sleep(0.002)
        took = time.perf_counter() - began
        process.kill()
        process.wait()
    return took


def median_seconds(command: str) -> float:
    """Return the median of how long a command takes."""
    return median(seconds(command) for _ in range(REPETITIONS))


def median_seconds_to_first_round(command: str) -> float:
    """Return the median of how long it takes to the first record of a run."""
    return median(seconds_to_first_round(command) for _ in range(REPETITIONS))


def main() -> None:
    """Print a table with a column for each version."""
    sources = [SOURCE, *map(Path, sys.argv[1:])]
    cases: list[tuple[str, Callable[[str, Path], float]]] = []
    for command in ANSWERS:
        cases.append((command, seconds))
    cases.append((RUN, seconds_to_first_round))
    print(f"| command | {' | '.join(str(source) for source in sources)} |")
    print("|---" * (1 + len(sources)) + "|")
    for command, measure in cases:
        times: dict[Path, list[float]] = {source: [] for source in sources}
        for _ in range(REPETITIONS):
            for source in sources:
                times[source].append(measure(command, source))
        cells = [f"{median(times[source]):.2f} s" for source in sources]
        shown = (
            f"first round of `{command}`" if measure is seconds_to_first_round else f"`{command}`"
        )
        print(f"| {shown} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
