"""The measured table of the tutorial is that of the stored results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorials" / "train-your-own-agent.md"


def test_the_table_is_the_measured_one() -> None:
    pytest.importorskip("stable_baselines3", reason="needs stable_baselines3")
    spec = importlib.util.spec_from_file_location("ppo", ROOT / "examples" / "sb3_ppo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = json.loads((ROOT / "benchmarks" / "results" / "sb3_ppo.json").read_text())
    table = f"<!-- ppo:begin -->\n{module.table(found)}\n<!-- ppo:end -->"
    assert table in PAGE.read_text()
