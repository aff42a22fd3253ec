"""What `fedglimpse compare` found, on the pages of docs/methods."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def comparison(name: str) -> str:
    """The table that `fedglimpse compare` wrote, from study/results/<name>."""
    return (ROOT / "study" / "results" / name / "comparison.md").read_text().strip()


def measured() -> dict[str, str]:
    """Accuracy of every method in study/results/all-digits, as `mean ± half width`."""
    table = comparison("all-digits").splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return {row[0].removesuffix(" (oracle)"): row[1] for row in cells}


def with_figures(path: Path) -> str:
    """Return a method's page with the figures of study/results/all-digits in its last section."""
    figures = measured()
    text, heading, last = path.read_text().partition("## Measured\n")
    number = r"[\d.]+ ± [\d.]+(?= %)"
    last = re.sub(rf"(?<=accuracy \*\*){number}", figures.get(path.stem, ""), last, count=1)
    said = rf"(`method=(fedavg|fedavg-window)`(?:, which gives| gives|) ){number}"
    last = re.sub(said, lambda m: m[1] + figures[m[2]], last)
    return text + heading + last
