"""Check Lemmas 1 to 4 and Theorem 1 on random quadratics, and store how often each fails.

    python study/tools/theory_quadratics.py

prints the table of docs/theory.md and writes study/results/theory/quadratics.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from exact_theory.statements import check, failures_text

INSTANCES = 500  # of each of the eight families
STORED = Path(__file__).parents[1] / "results" / "theory" / "quadratics.json"


def main() -> None:
    """Check, print, store."""
    counts = check(INSTANCES)
    figures = {name: count._asdict() for name, count in counts.items()}
    STORED.write_text(json.dumps(figures, indent=1) + "\n")
    print(failures_text(counts))


if __name__ == "__main__":
    main()
