"""Small runs and sweeps to be disturbed, and how they are resumed and compared."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fedglimpse
from fedglimpse.errors import UserError
from fedglimpse.studies.sweep.plan import read_plan
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep

RUN: dict[str, Any] = {
    "method": "glimpse",
    "rounds": 5,
    "data.clients": 8,
    "visibility.cluster_size": 4,
    "selection.k": 2,
    "agent.learn_start": 2,
    "agent.updates_per_round": 1,
    "agent.d_token": 8,
    "agent.heads": 2,
    "agent.history": 3,
    "sketch.size": 8,
    "checkpoint.every": 2,
    "checkpoint.keep_models": 2,
}
SWEEP = """
title = "Faults"
claim = "nothing is lost"
control = "fedavg"
methods = ["fedavg", "fedavg-window"]
[base]
seeds = [0, 1]
rounds = 4
checkpoint.every = 2
data.clients = 8
visibility.cluster_size = 4
selection.k = 2
[[settings]]
name = "digits"
"""


@dataclass
class Tries:
    """How often something was tried, and what went wrong."""

    name: str
    number: int = 0
    failures: list[str] = field(default_factory=list)

    def attempt(self, case: object, check: Callable[[], str]) -> None:
        """Try a case; `check` returns what is wrong, or nothing."""
        self.number += 1
        try:
            problem = check()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            self.failures.append(f"{case}: {problem}")


def run_in(folder: Path, resume: bool = True, **settings: Any) -> list[dict[str, Any]]:
    """Run, or resume, the small run in a folder; return its records."""
    settings = {key.replace("__", "."): value for key, value in settings.items()}
    result = fedglimpse.run({**RUN, **settings}, folder, resume=resume)
    return untimed(result.records)


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records without what differs from one machine to another."""
    return [{**record, "seconds": 0} for record in records]


def sweep_in(folder: Path, file: Path, lanes: int = 2) -> None:
    """Run, or resume, the small sweep in a folder; raises AssertionError unless all is done."""
    plan = read_plan(file, smoke=False)
    outcome = run_sweep(plan, folder, SweepOptions(lanes=lanes, quiet=True))
    assert (outcome.left, dict(outcome.failed)) == (0, {}), outcome


def sweep_results(folder: Path) -> dict[str, Any]:
    """Return what a finished sweep holds, by cell, without wall times."""
    results: dict[str, Any] = {}
    for cell in sorted((folder / "cells").iterdir()):
        summary = {**json.loads((cell / "summary.json").read_text()), "seconds": 0}
        lines = gzip.decompress((cell / "rounds.jsonl.gz").read_bytes()).decode().splitlines()
        records = untimed([json.loads(line) for line in lines])
        results[cell.name] = (summary, records, (cell / "config.toml").read_text())
    return results


def copied(source: Path, target: Path) -> Path:
    """Return a fresh copy of a folder."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


def refused(error: UserError, *names: str) -> str:
    """Return what is wrong with the sentence about a damaged file; nothing where it is right."""
    text = str(error)
    if len(text.splitlines()) != 1:
        return f"more than one line: {text}"
    if names and not any(name in text for name in names):
        return f"names none of {names}: {text}"
    return ""
