"""Check Lemmas 1 to 4 and Theorem 1 on random quadratics, and store how often each fails.

    python tools/theory_quadratics.py

prints the table of docs/theory.md and writes results/theory/quadratics.json.
"""

from __future__ import annotations

import json
from pathlib import Path

from fedglimpse.theory.check import tallies, tally_text

INSTANCES = 500  # of each of the eight families
STORED = Path(__file__).parents[1] / "results" / "theory" / "quadratics.json"


def main() -> None:
    """Check, print, store."""
    found = tallies(INSTANCES)
    STORED.write_text(json.dumps({n: t._asdict() for n, t in found.items()}, indent=1) + "\n")
    print(tally_text(found))


if __name__ == "__main__":
    main()
