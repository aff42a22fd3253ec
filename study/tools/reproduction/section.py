"""A study at a glance and what is missing of it; and each of its settings in detail."""

from __future__ import annotations

from reproduction import accuracy, costs
from reproduction.markdown import folded, paragraphs
from reproduction.pooled import pooled
from reproduction.shelf import Stored
from reproduction.unfinished import not_finished, reason

DETAILS = "reproduction-settings.md"  # beside the page of the sections


def section(stored: Stored) -> str:
    """Return everything that is known of a study; one line where nothing is."""
    study = stored.study
    if not stored.begun:
        return f"Not run yet ({len(study.cells)} cells; reason: {reason(stored.name)})."
    departures = f"Not as in the file: {'; '.join(stored.departures)}."
    return paragraphs(
        [
            f"What is tested: {study.claim}",
            accuracy.overview(stored.results),
            pooled(stored),
            departures if stored.departures else "",
            _lent(stored),
            f"Each setting, its costs and who took part: [{stored.name}]({DETAILS}#{stored.name}).",
            not_finished(stored.name, study),
        ]
    )


def settings(stored: Stored) -> str:
    """Return differences, costs to target and participation, setting by setting."""
    if not stored.begun:
        return "Not run yet."
    return paragraphs([*(_setting(stored, s) for s in stored.study.settings), costs.legend()])


def _lent(stored: Stored) -> str:
    runs = [f"{count} of `{name}`" for name, count in sorted(stored.lenders.items())]
    return f"Runs that another study has are not played twice: {', '.join(runs)}." if runs else ""


def _setting(stored: Stored, setting: str) -> str:
    rows = stored.results.of(setting)
    if not any(row.spread or row.to_target for row in rows):
        return ""
    given = stored.results.targets.get(setting)
    return folded(
        setting,
        [
            accuracy.detail(stored.results, setting),
            accuracy.not_as_in_the_paper(rows),
            costs.to_target(stored.results, setting) if given and given.given else "",
            costs.to_target(stored.results_to_best, setting),
            costs.participation(stored.results, setting),
        ],
    )
