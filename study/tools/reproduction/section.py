"""A study at a glance and what is missing of it; and each of its settings in detail."""

from __future__ import annotations

from collections import Counter

from fedglimpse.studies.results.study import CellState, Study
from reproduction import accuracy, costs
from reproduction.markdown import folded, paragraphs, table
from reproduction.pooled import pooled
from reproduction.shelf import Stored

DETAILS = "reproduction-settings.md"  # beside the page of the sections
REASON = "GPU time"  # why cells are not run
UNFINISHED: dict[CellState, str] = {
    "unfinished": "begun",
    "failed": "failed",
    "missing": "not begun",
}


def section(stored: Stored) -> str:
    """Return everything that is known of a study; one line if nothing is."""
    study = stored.study
    if not stored.begun:
        return f"Not run yet ({len(study.cells)} cells; reason: {REASON})."
    departures = f"Not as in the file: {'; '.join(stored.departures)}."
    return paragraphs(
        [
            f"What is tested: {study.claim}",
            accuracy.overview(stored.results),
            pooled(stored),
            departures if stored.departures else "",
            _reused_runs(stored),
            f"Each setting, its costs and who took part: [{stored.name}]({DETAILS}#{stored.name}).",
            not_finished(study),
        ]
    )


def settings(stored: Stored) -> str:
    """Return differences, costs to target and participation, setting by setting."""
    if not stored.begun:
        return "Not run yet."
    texts = [_setting(stored, setting) for setting in stored.study.settings]
    return paragraphs([*texts, costs.LEGEND])


def _reused_runs(stored: Stored) -> str:
    runs = [f"{count} of `{name}`" for name, count in sorted(stored.lenders.items())]
    if not runs:
        return ""
    return f"Runs that another study has are not repeated: {', '.join(runs)}."


def _setting(stored: Stored, setting: str) -> str:
    rows = stored.results.of(setting)
    if not any(row.spread or row.to_target for row in rows):
        return ""
    target = stored.results.targets.get(setting)
    has_own_target = target is not None and target.given
    return folded(
        setting,
        [
            accuracy.detail(stored.results, setting),
            accuracy.not_as_in_the_paper(rows),
            costs.to_target(stored.results, setting) if has_own_target else "",
            costs.to_target(stored.results_to_best, setting),
            costs.participation(stored.results, setting),
        ],
    )


def not_finished(study: Study) -> str:
    """Return how many cells of each setting are missing, and why."""
    lines: list[list[str]] = []
    for setting in study.settings:
        states = Counter(cell.state for cell in study.cells if cell.setting == setting)
        planned = states.total()
        if states["finished"] < planned:
            counts = [str(states[state]) for state in UNFINISHED]
            lines.append([setting, str(planned), str(states["finished"]), *counts])
    if not lines:
        return f"All {len(study.cells)} cells have finished."
    header = ["setting", "cells", "finished", *UNFINISHED.values()]
    unfinished = len(study.cells) - study.count("finished")
    title = f"Not run yet: {unfinished} of {len(study.cells)} cells. Reason: {REASON}."
    return paragraphs([title, table(header, lines), _failures(study)])


def _failures(study: Study) -> str:
    reasons = Counter(cell.reason for cell in study.cells if cell.state == "failed")
    lines: list[str] = []
    for reason, count in reasons.items():
        lines.append(f"- {count} failed: {reason or 'no reason recorded'}")
    return "\n".join(lines)
