"""How much FedAWAC depends on what its article leaves open: mode x map, on digits.

    python plans/fedawac_sensitivity.py

prints the table of docs/methods/fedawac.md: every client holds two classes, the server sees one
cluster of ten at a time, three seeds, 60 rounds.
"""

from __future__ import annotations

from typing import Any

import fedglimpse
from fedglimpse.runs.summary import Estimate

MODES = ("class_var", "ensemble_dev")
MAPS = ("inverse", "softmax", "proportional")
SETTING: dict[str, Any] = {
    "data.name": "digits",
    "data.partition": "label_skew",
    "visibility.kind": "mobile",
    "seeds": [0, 1, 2],
    "rounds": 60,
}


def accuracy(method: str, **options: Any) -> str:
    """Run a method; returns its accuracy in per cent with a 95 % interval over seeds."""
    own = {f"options.{name}": value for name, value in options.items()}
    result = fedglimpse.run({**SETTING, "method": method, **own})
    return Estimate(**result.summary["final_accuracy"]).text()


def main() -> None:
    """Print the table as Markdown, line by line."""
    print("| method | window 2 (default) | window 1: no history |\n|---|---|---|")
    for mode in MODES:
        for kind in MAPS:
            cells = [accuracy("fedawac", mode=mode, map=kind, window=m) for m in (2, 1)]
            print(f"| fedawac, `{mode}`, `{kind}` | {cells[0]} | {cells[1]} |", flush=True)
    correlated = accuracy("fedawac", history="most_correlated")
    print(f"| fedawac, `class_var`, `inverse`, `most_correlated` | {correlated} | |")
    print(f"| fedavg | | {accuracy('fedavg')} |")


if __name__ == "__main__":
    main()
