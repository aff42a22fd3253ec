"""Which planned cells have no result, and why."""

from __future__ import annotations

from collections import Counter

from fedglimpse.studies.results import Study
from fedglimpse.studies.results.study import CellState
from reproduction.markdown import table

WHY = "GPU time"  # unless something else is written here
WHY_OF: dict[str, str] = {}  # study -> why its cells are not run
STATES: dict[CellState, str] = {"unfinished": "begun", "failed": "failed", "missing": "not begun"}


def reason(name: str) -> str:
    """Return why a study is not finished."""
    return WHY_OF.get(name, WHY)


def not_finished(name: str, study: Study) -> str:
    """Return how many cells of each setting are missing, and why."""
    lines = []
    for setting in study.settings:
        states = Counter(cell.state for cell in study.cells if cell.setting == setting)
        planned = sum(states.values())
        if states["finished"] < planned:
            others = [str(states[state]) for state in STATES]
            lines.append([setting, str(planned), str(states["finished"]), *others])
    if not lines:
        return f"All {len(study.cells)} cells have finished."
    head = ["setting", "cells", "finished", *STATES.values()]
    left = len(study.cells) - study.count("finished")
    title = f"Not run yet: {left} of {len(study.cells)} cells. Reason: {reason(name)}."
    return f"{title}\n\n{table(head, lines)}" + _failures(study)


def _failures(study: Study) -> str:
    why = Counter(cell.reason for cell in study.cells if cell.state == "failed")
    lines = [f"- {count} failed: {text or 'no reason recorded'}" for text, count in why.items()]
    return "\n\n" + "\n".join(lines) if lines else ""
