"""Does a smaller selection deviation go with faster convergence? Digits, ten methods, ten seeds.

    python study/tools/theory_rank.py dirichlet
    python study/tools/theory_rank.py label_skew

runs every method that differs from FedAvg in its choice alone (same budget, plain averaging), keeps
models, measures the theory panel of each run, and prints the tables of docs/theory.md. The figures
are stored in study/results/theory/rank-digits-PARTITION.json, the runs in runs/theory-PARTITION;
finished runs are not repeated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import fedglimpse
from fedglimpse.theory.panel import FILE, LanePanel, Panel, measure_run, read_panel
from fedglimpse.theory.rank import comparison_text, correlations_of, grouped

METHODS = (
    "fedavg", "glimpse", "herd", "dpp", "oracle-balance", "power-of-choice", "oort", "favor",
    "fedabc", "ha-edgeflow",
)  # fmt: skip
SETTING: dict[str, Any] = {
    "preset": "tuned-1",
    "data.name": "digits",
    "model.norm": "group",  # BatchNorm is not a function of the model alone
    "aggregate.window": 1,  # glimpse without temporal averaging: the choice alone
    "seeds": list(range(10)),
    "rounds": 60,
    "checkpoint.keep_models": 3,
}
OPTIONS: dict[str, dict[str, Any]] = {"oracle-balance": {"options.allow_oracle": True}}
STORED = Path(__file__).parents[1] / "results" / "theory"


def panel(method: str, partition: str, folder: Path) -> Panel:
    """Run a method and measure it, or read the stored panel."""
    if (folder / FILE).exists():
        return read_panel(folder)
    settings = {**SETTING, "data.partition": partition, "method": method}
    settings |= OPTIONS.get(method, {})
    fedglimpse.run(settings, folder, resume=True)
    return measure_run(folder)


def method_figures(lanes: Sequence[LanePanel]) -> dict[str, Any]:
    """Return the stored figures of one method, one value for each seed."""
    return {
        "accuracy": [lane.accuracy for lane in lanes],
        "relative_deviation": [lane.relative_deviation for lane in lanes],
        "deviation": [lane.constants.deviation for lane in lanes],
        "gap": [lane.constants.gap for lane in lanes],
        "gradient": [lane.measured for lane in lanes],
        "step_condition": mean(lane.step_condition for lane in lanes),
    }


def main() -> None:
    """Run everything, print the tables and store the figures."""
    partition = sys.argv[1] if len(sys.argv) > 1 else "dirichlet"
    out = Path("runs") / f"theory-{partition}"
    panels = []
    for method in METHODS:
        panels.append(panel(method, partition, out / method))
        print(f"{method} done", file=sys.stderr, flush=True)
    groups = grouped(panels, METHODS)
    figures = {
        "setting": {**SETTING, "data.partition": partition},
        "methods": {name: method_figures(lanes) for name, lanes in groups.items()},
        "correlations": {
            name: asdict(correlation) for name, correlation in correlations_of(groups).items()
        },
    }
    path = STORED / f"rank-digits-{partition}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n")
    print(comparison_text(panels, METHODS))


if __name__ == "__main__":
    main()
