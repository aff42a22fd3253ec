"""What takes minutes: every method in one comparison, every preset on the real datasets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedglimpse.data.sources import status
from fedglimpse.methods import registry

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def fedglimpse(*words: str) -> subprocess.CompletedProcess[str]:
    here = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedglimpse", *words]
    return subprocess.run(
        command, env=here, capture_output=True, text=True, timeout=1200, check=False
    )


def test_one_command_compares_all_methods(tmp_path: Path) -> None:
    began = time.monotonic()
    done = fedglimpse("compare", "all", "data.name=digits", "seeds=[0,1,2]", "rounds=60", "-q",
                      "options.allow_oracle=true", "--out", str(tmp_path / "all"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 600
    for name in registry.MODULES:
        assert f"| {name}" in done.stdout
    assert "oracle-balance (oracle)" in done.stdout


@pytest.mark.parametrize("data", ["hapt", "fashion", "cifar10"])
@pytest.mark.parametrize("preset", ["tuned", "paper", "released"])
def test_presets_run_on_real_data(data: str, preset: str, tmp_path: Path) -> None:
    if not status(data).present:
        pytest.skip(f"{data} is not on this machine")
    words = [
        f"preset={preset}",
        f"data.name={data}",
        "method=glimpse",
        "rounds=1",
        "data.proxy=200",
    ]
    ragged = [
        "visibility.kind=random",
        "visibility.p=0.05" if data != "hapt" else "visibility.p=0.3",
    ]
    done = fedglimpse("run", *words, *ragged, "-q", "--out", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r" / "rounds.jsonl").read_text())
    assert 0 < record["accuracy"] <= 1
    assert len(record["q"]) == len(record["visible"])
