"""The measured tables of the pages are those of the stored results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = [
    ("docs/environment.md", "environment", "benchmarks/environment.py", "environment.json"),
    ("docs/tutorials/train-your-own-agent.md", "ppo", "examples/sb3_ppo.py", "sb3_ppo.json"),
]


@pytest.mark.parametrize(("page", "mark", "program", "result"), TABLES, ids=lambda v: v)
def test_tables_are_the_measured_ones(page: str, mark: str, program: str, result: str) -> None:
    if mark == "ppo":
        pytest.importorskip("stable_baselines3", reason="needs stable_baselines3")
    spec = importlib.util.spec_from_file_location(mark, ROOT / program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file = ROOT / "benchmarks" / "results" / result
    if not file.exists():
        pytest.skip(f"{result} has not been measured")
    found = json.loads(file.read_text())
    table = f"<!-- {mark}:begin -->\n{module.table(found)}\n<!-- {mark}:end -->"
    assert table in (ROOT / page).read_text()
