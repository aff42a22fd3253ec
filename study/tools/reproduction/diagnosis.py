"""What the agent learnt: a table of what plans/agent_diagnosis.py stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from reproduction.markdown import paragraphs, table

MEASURES = ("spread / error", "spread / level", "attention", "persistence", "agreement")
Runs = Mapping[str, Mapping[str, float]]  # seed -> measure -> value


def diagnosis(folder: Path) -> str:
    """Return every stored study, setting by setting, mean and deviation over seeds."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not found:
        return "Not run yet."
    return paragraphs(part for one in found for part in (f"    {one['what']}", _table(one)))


def _table(one: Mapping[str, Any]) -> str:
    settings = one["results"]
    rows = [[name, *(_text(runs, m) for m in MEASURES)] for name, runs in settings.items()]
    everything = {f"{n} {seed}": run for n, runs in settings.items() for seed, run in runs.items()}
    rows.append(["all runs", *(_text(everything, m) for m in MEASURES)])
    return table(["setting", *MEASURES], rows)


def _text(runs: Runs, measure: str) -> str:
    values = [run[measure] for run in runs.values() if measure in run]
    if not values:
        return "–"
    digits = 3 if measure in ("spread / level", "attention") else 2
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread} ({len(values)})".replace("-", "−")
