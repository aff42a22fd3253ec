"""The figures of docs/theory.md are those of the stored results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exact_theory.statements import FailureCount, failures_text
from fedglimpse.runs.summary import Estimate
from fedglimpse.theory.panel import read_panel
from fedglimpse.theory.rank import Correlation, correlation_text
from fedglimpse.theory.text import panel_text

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "theory.md").read_text()
STORED = ROOT / "study" / "results" / "theory"


def test_the_table_of_statements_is_the_stored_one() -> None:
    stored = json.loads((STORED / "quadratics.json").read_text())
    counts = {name: FailureCount(**values) for name, values in stored.items()}
    assert failures_text(counts) in PAGE


@pytest.mark.parametrize("name", ["digits", "fashion"])
def test_panels_are_the_stored_ones(name: str) -> None:
    tables = panel_text(read_panel(STORED / name)).split("\n\n")[1:3]
    assert all(table in PAGE for table in tables)


@pytest.mark.parametrize("path", sorted(STORED.glob("rank-*.json")), ids=lambda p: p.stem)
def test_rank_correlations_are_the_stored_ones(path: Path) -> None:
    stored = json.loads(path.read_text())["correlations"]
    correlations = {
        name: Correlation(**values | {"within_seeds": Estimate(**values["within_seeds"])})
        for name, values in stored.items()
    }
    assert correlation_text(correlations) in PAGE
