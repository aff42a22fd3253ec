"""The figures that prose quotes are those of the generated claims."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INTERVAL = r"([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\]"


def printed_by(tool: str) -> str:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool)],
        capture_output=True, text=True, check=True, timeout=120,
    ).stdout  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "claim", "words"),
    [
        ("figures_of_table1.py", "2", "over the strongest, both, of the seven"),
        ("figures_of_table1.py", "3", "over the strongest, both, label skew"),
        ("figures_of_studies.py", "28", "Adam, glimpse minus fedavg-window, all settings"),
        (
            "figures_of_studies.py",
            "37",
            "accuracy, glimpse, taught minus fedavg-window, all settings",
        ),
        ("figures_of_studies.py", "21", "20 visible minus 10, the same share, glimpse"),
    ],
)
def test_a_figure_is_that_of_the_claim(tool: str, claim: str, words: str) -> None:
    page = (ROOT / "pages" / "reproduction.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| {claim} |"))
    found = re.search(rf"{re.escape(words)}: {INTERVAL}", printed_by(tool))
    assert found is not None
    mean, low, high = (f"{float(number):+.1f}".replace("-", "−") for number in found.groups())
    assert f"{mean} [{low}, {high}] points" in row
