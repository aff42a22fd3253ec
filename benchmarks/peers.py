"""Whole rounds beside other simulators, in one run: local training, aggregation, test.

    python benchmarks/peers.py [--peer-python /path/to/venv/bin/python] [--repeats 3]

Contestants are the scripts of `peers/`. Each runs in a process of its own; all take turns, so that
a slow moment of the machine hits every one of them. The figure is the median over the rounds of
all turns but each turn's first. A framework that neither Python has is listed as not measured:

    python -m venv peers && peers/bin/pip install torch==2.13.0 fluke-fl==0.8.1 pfl==0.6.0 scipy \
        scikit-learn typer rich
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from trainers import cpu_name

from fedglimpse.runs.provenance import code

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "peers.json"
CONTESTANTS = {  # script -> the package it needs, and what it is called in the table
    "plain": ("torch", "plain PyTorch loop"),
    "flower": ("flwr", "Flower simulation"),
    "pfl": ("pfl", "pfl-research"),
    "fluke": ("fluke", "fluke"),
    "fedglimpse": ("torch", "fedglimpse"),
}
ROUNDS = {"fashion": 4, "har": 16}  # of a turn; the first of them warms up
TARGETS = {
    "fashion": {"plain": 0.70, "flower": 0.60},
    "har": {"plain": 0.55, "flower": 0.40},
}


def python_with(package: str, pythons: list[str]) -> str | None:
    """Return the first Python that has a package."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{package}') is None)"
    for python in pythons:
        if subprocess.run([python, "-c", look], check=False).returncode == 0:
            return python
    return None


def turn(python: str, contestant: str, case: str, words: argparse.Namespace) -> dict[str, Any]:
    """Let a contestant play its rounds; returns its version and their seconds."""
    script = HERE / "peers" / f"run_{contestant}.py"
    rounds = words.rounds or ROUNDS[case]
    options = {"case": case, "rounds": rounds, "threads": words.threads, "scale": words.scale}
    flags = [f"--{name}={value}" for name, value in options.items()]
    source = str(HERE.parent / "src")
    done = subprocess.run(
        [python, str(script), *flags],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=words.timeout,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{script.name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: str, pythons: dict[str, str], words: argparse.Namespace) -> dict[str, Any]:
    """Return seconds and ratios of every contestant in one case."""
    seconds: dict[str, list[float]] = {name: [] for name in pythons}
    versions = {}
    for _ in range(words.repeats):
        for name, python in pythons.items():
            found = turn(python, name, case, words)
            seconds[name] += found["seconds"][1:]
            versions[name] = found["version"]
            print(f"{case:8} {name:11} {[round(s, 3) for s in found['seconds']]}", flush=True)
    medians = {name: median(values) for name, values in seconds.items()}
    ours = medians["fedglimpse"]
    return {
        name: {
            "version": versions[name],
            "seconds": round(medians[name], 4),
            "quartiles": [round(q, 4) for q in quantiles(seconds[name])],
            "rounds": len(seconds[name]),
            "fedglimpse_takes": round(ours / medians[name], 3),
            "target": TARGETS[case].get(name),
        }
        for name in medians
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", default="", help="a Python that has the peers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0, help="of a turn; 0: the case's own number")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="less than 1 tries the scripts")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds of one turn")
    parser.add_argument("--cases", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    words = parser.parse_args()
    pythons = [sys.executable, *([words.peer_python] if words.peer_python else [])]
    found = {name: python_with(needs, pythons) for name, (needs, _) in CONTESTANTS.items()}
    present = {name: python for name, python in found.items() if python}
    missing = [CONTESTANTS[name][1] for name, python in found.items() if not python]
    load = os.getloadavg()
    results = {case: measure(case, present, words) for case in words.cases}
    for case, table in results.items():
        for name, row in table.items():
            target = f" (target {row['target']})" if row["target"] else ""
            label = CONTESTANTS[name][1]
            print(f"{case:8} {label:20} {row['seconds']:8.3f} s  "
                  f"fedglimpse takes {row['fedglimpse_takes']:.2f} of it{target}")  # fmt: skip
    for name in missing:
        print(f"not measured: {name}")
    facts = {
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "threads": words.threads,
        "scale": words.scale,
        "load_average_before": [round(value, 2) for value in load],
        **code(),
        "not_measured": missing,
    }
    words.out.parent.mkdir(exist_ok=True)
    words.out.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    print(f"results: {words.out}")


if __name__ == "__main__":
    main()
