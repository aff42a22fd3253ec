"""What the agent learnt: a table of what plans/agent_diagnosis.py stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

from reproduction.markdown import paragraphs, table

MEASURES = ("spread / error", "spread / level", "attention", "persistence", "agreement")
THREE_DIGITS = ("spread / level", "attention")
Runs = Mapping[str, Mapping[str, float]]  # seed -> measure -> value


def diagnosis(folder: Path) -> str:
    """Return every stored study, setting by setting, mean and deviation over seeds."""
    texts: list[str] = []
    for path in sorted(folder.glob("*.json")):
        study = json.loads(path.read_text())
        texts += [f"    {study['what']}", _table(study["results"])]
    return paragraphs(texts) or "Not run yet."


def _table(settings: Mapping[str, Runs]) -> str:
    rows: list[list[str]] = []
    all_runs: dict[str, Mapping[str, float]] = {}
    for setting, runs in settings.items():
        rows.append(_row(setting, runs))
        for seed, run in runs.items():
            all_runs[f"{setting} {seed}"] = run
    rows.append(_row("all runs", all_runs))
    return table(["setting", *MEASURES], rows)


def _row(name: str, runs: Runs) -> list[str]:
    return [name, *(_text(runs, measure) for measure in MEASURES)]


def _text(runs: Runs, measure: str) -> str:
    values = [run[measure] for run in runs.values() if measure in run]
    if not values:
        return "–"
    digits = 3 if measure in THREE_DIGITS else 2
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread} ({len(values)})".replace("-", "−")
