"""Final accuracy: all variants in all settings at a glance, and one setting in detail."""

from __future__ import annotations

from collections.abc import Sequence

from fedglimpse.studies.report.analysis import Comparison, ReportRow, Results
from fedglimpse.studies.report.numbers import interval, mean_and_std, percent
from reproduction.markdown import table


def overview(results: Results) -> str:
    """Return variants x settings; whichever there is more of goes down the page."""
    settings, variants = results.study.settings, results.study.variants
    rows = {(row.setting, row.variant): row for row in results.rows}

    def text(setting: str, variant: str) -> str:
        row = rows.get((setting, variant))
        return "" if row is None else _short(row)

    if len(settings) > len(variants):
        lines = [[s, *(text(s, v) for v in variants)] for s in settings]
        return table(["setting", *variants], lines)
    return table(["variant", *settings], [[v, *(text(s, v) for s in settings)] for v in variants])


def _short(row: ReportRow) -> str:
    paper = f"<br>paper {_figure(row)}" if row.published else ""
    if row.spread is None:
        return f"not run yet{paper}"
    text = mean_and_std(row.spread)
    text = f"**{text}**" if row.best else text
    return f"{text}{_mark(row.control)} ({seeds(row)}){paper}"


def _figure(row: ReportRow) -> str:
    """Return the published figure of a row."""
    if row.published is None:
        return "–"
    figure = row.published.figure
    return f"{percent(figure.mean)} ± {percent(figure.std)}"


def _mark(comparison: Comparison | None) -> str:
    if comparison is None or not comparison.significant:
        return ""
    return " ▲" if comparison.difference.mean > 0 else " ▼"


def seeds(row: ReportRow) -> str:
    """Return how many seeds have finished, and of how many where some have not."""
    planned = len(row.cells)
    return str(planned) if row.finished == planned else f"{row.finished} of {planned}"


def detail(results: Results, setting: str) -> str:
    """Return one setting with its differences to the control and to the paper."""
    rows = results.of(setting)
    with_paper = any(row.published for row in rows)
    head = ["variant", "accuracy %", "± over rounds", "seeds", f"minus {results.control}", "is"]
    head += ["paper %", "ours − paper", "is"] if with_paper else []
    return table(head, [_line(row, results.control, with_paper) for row in rows])


def _line(row: ReportRow, control: str | None, with_paper: bool) -> list[str]:
    spread = row.spread
    cells = [
        row.variant + (" (oracle)" if row.oracle else ""),
        "not run yet" if spread is None else mean_and_std(spread),
        "–" if spread is None else percent(spread.over_rounds),
        seeds(row),
    ]
    cells += ["control", ""] if row.variant == control else _compared(row.control)
    if with_paper:
        cells += [_figure(row), *_compared(row.paper)]
    return cells


def _compared(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return ["–", "–"]
    return [interval(comparison.difference), comparison.verdict]


def not_as_in_the_paper(rows: Sequence[ReportRow]) -> str:
    """Return every key in which runs are not what the paper describes."""
    found = dict.fromkeys(d for row in rows if row.published for d in row.published.deviations)
    return f"Not as in the paper: {'; '.join(found)}." if found else ""
