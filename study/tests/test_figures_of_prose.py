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


QUOTED = {  # tool -> the claim of the page and the words of the tool before the same figure
    "figures_of_table1.py": [
        ("2", "over the strongest, both, of the seven"),
        ("3", "over the strongest, both, label skew"),
    ],
    "figures_of_studies.py": [
        ("28", "Adam, glimpse minus fedavg-window, all settings"),
        ("37", "accuracy, glimpse, taught minus fedavg-window, all settings"),
        ("21", "20 visible minus 10, the same share, glimpse"),
    ],
}


@pytest.mark.parametrize("tool", QUOTED)
def test_quoted_figures_are_those_of_the_claims(tool: str) -> None:
    page = (ROOT / "pages" / "reproduction.md").read_text(encoding="utf-8")
    output = printed_by(tool)
    for claim, words in QUOTED[tool]:
        row = next(line for line in page.splitlines() if line.startswith(f"| {claim} |"))
        match = re.search(rf"{re.escape(words)}: {INTERVAL}", output)
        assert match is not None, words
        mean, low, high = (f"{float(number):+.1f}".replace("-", "−") for number in match.groups())
        assert f"{mean} [{low}, {high}] points" in row
