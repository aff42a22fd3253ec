"""Memory and seconds a round as the population grows, with the same 100 visible clients.

    python benchmarks/population.py [--rounds 20] [--out benchmarks/results/population.json]

Every population runs in its own process, so that the peak memory is its own. Sizes take turns, and
the figures are medians over the rounds of all turns and the largest peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from trainers import cpu_name

from fedglimpse.runs.provenance import code

RESULTS = Path(__file__).parent / "results" / "population.json"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
WARM_UP = 2  # rounds that are left out


def settings(clients: int, rounds: int) -> dict[str, Any]:
    """Return the run: 100 visible clients of 20 examples each, 20 chosen by the agent."""
    return {
        "data.name": "synthetic",
        "data.clients": clients,
        "data.samples": 20,
        "visibility.kind": "mobile",
        "visibility.cluster_size": 100,
        "selection.k": 20,
        "method": "glimpse",
        "rounds": rounds,
        "engine.device": "cpu",
    }


def one(clients: int, rounds: int, threads: int) -> dict[str, Any]:
    """Run one population in this process."""
    from fedglimpse.runs.experiment import run

    torch.set_num_threads(threads)
    began = time.perf_counter()
    result = run(settings(clients, rounds))
    seconds = [record["seconds"] for record in result.records]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux
    start = time.perf_counter() - began - sum(seconds)
    return {"seconds": seconds[WARM_UP:], "start_seconds": start, "peak_mib": peak}


def measure(clients: int, rounds: int, threads: int) -> dict[str, Any]:
    words = ["--one", str(clients), "--rounds", str(rounds), "--threads", str(threads)]
    done = subprocess.run(
        [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one:
        print(json.dumps(one(words.one, words.rounds, words.threads)))
        return
    found: dict[int, list[dict[str, Any]]] = {clients: [] for clients in SIZES}
    for _ in range(words.repeats):
        for clients in SIZES:
            found[clients].append(measure(clients, words.rounds, words.threads))
    results = {}
    for clients, turns in found.items():
        results[clients] = {
            "seconds_per_round": round(median(s for turn in turns for s in turn["seconds"]), 4),
            "seconds_to_start": round(median(turn["start_seconds"] for turn in turns), 2),
            "peak_mib": round(max(turn["peak_mib"] for turn in turns)),
        }
        print(f"{clients:>9,} clients: {results[clients]}")
    facts = {"torch": torch.__version__, "cpu": cpu_name(), "threads": words.threads}
    text = {**facts, **code(), "settings": settings(0, words.rounds), "results": results}
    words.out.parent.mkdir(exist_ok=True)
    words.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
