"""Small sweeps for tests, and what is left of one when wall times are put aside."""

from __future__ import annotations

import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SWEEP = [sys.executable, "-m", "fedglimpse", "sweep"]

SMALL = """
title = "Small"
claim = "it runs"
control = "fedavg"
methods = ["fedavg", "glimpse"]
[base]
seeds = [0, 1]
rounds = 8
checkpoint.every = 3
agent.learn_start = 2
agent.n_step = 1
agent.updates_per_round = 1
[[settings]]
name = "digits, mobile"
target = 0.5
visibility.kind = "mobile"
[[settings]]
name = "digits, random"
visibility.kind = "random"
[smoke]
rounds = 1
"""


def write(folder: Path, text: str = SMALL, name: str = "small.toml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def records(cell: Path) -> list[dict[str, Any]]:
    text = gzip.decompress((cell / "rounds.jsonl.gz").read_bytes()).decode()
    return [{**json.loads(line), "seconds": 0} for line in text.splitlines()]


def results(out: Path) -> dict[str, Any]:
    """Return everything a sweep found out, by cell, without wall times."""
    found = {}
    for cell in sorted((out / "cells").iterdir()):
        summary = {**json.loads((cell / "summary.json").read_text()), "seconds": 0}
        found[cell.name] = (summary, records(cell), (cell / "config.toml").read_text())
    return found
