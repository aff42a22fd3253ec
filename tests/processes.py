"""The command `fedglimpse` as a process of its own: for signals, limits and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from signalled import command

ROOT = Path(__file__).parents[1]
SECONDS = 120  # after which a process is taken to hang


def environment() -> dict[str, str]:
    """Return the environment of a process that computes as the tests do."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def run_process(words: Sequence[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        words, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=SECONDS,
        check=False,
    )  # fmt: skip


def fedglimpse_process(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `fedglimpse` as a user does."""
    return run_process([sys.executable, "-m", "fedglimpse", *words], cwd)


def fedglimpse_signalled(
    name: str, operation: int, folder: Path, *words: str
) -> subprocess.CompletedProcess[str]:
    """Run `fedglimpse` with a signal before a file operation in a folder (see signalled.py)."""
    return run_process([*command(name, operation, folder), *words])
