"""Final accuracy: all variants in all settings at a glance, and one setting in detail."""

from __future__ import annotations

from collections.abc import Sequence

from fedglimpse.studies.report.analysis import Comparison, ReportRow, Results
from fedglimpse.studies.report.numbers import interval, mean_and_std, percent
from reproduction.markdown import table

NOT_RUN = "not run yet"


def overview(results: Results) -> str:
    """Return variants x settings; whichever there is more of goes down the page."""
    settings = results.study.settings
    variants = results.study.variants
    texts: dict[tuple[str, str], str] = {}
    for row in results.rows:
        texts[row.setting, row.variant] = _short(row)
    lines: list[list[str]] = []
    if len(settings) > len(variants):
        for setting in settings:
            lines.append([setting, *(texts.get((setting, variant), "") for variant in variants)])
        return table(["setting", *variants], lines)
    for variant in variants:
        lines.append([variant, *(texts.get((setting, variant), "") for setting in settings)])
    return table(["variant", *settings], lines)


def _short(row: ReportRow) -> str:
    paper = f"<br>paper {_figure(row)}" if row.published else ""
    if row.spread is None:
        return f"{NOT_RUN}{paper}"
    accuracy = mean_and_std(row.spread)
    if row.best:
        accuracy = f"**{accuracy}**"
    return f"{accuracy}{_mark(row.control)} ({seeds(row)}){paper}"


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
    """Return how many seeds have finished, and of how many if some have not."""
    planned = len(row.cells)
    return str(planned) if row.finished == planned else f"{row.finished} of {planned}"


def detail(results: Results, setting: str) -> str:
    """Return one setting with its differences to the control and to the paper."""
    rows = results.of(setting)
    with_paper = any(row.published for row in rows)
    header = ["variant", "accuracy %", "± over rounds", "seeds", f"minus {results.control}", "is"]
    if with_paper:
        header += ["paper %", "ours − paper", "is"]
    return table(header, [_line(row, results.control, with_paper) for row in rows])


def _line(row: ReportRow, control: str | None, with_paper: bool) -> list[str]:
    spread = row.spread
    cells = [
        row.variant + (" (oracle)" if row.oracle else ""),
        NOT_RUN if spread is None else mean_and_std(spread),
        "–" if spread is None else percent(spread.over_rounds),
        seeds(row),
    ]
    cells += ["control", ""] if row.variant == control else _difference(row.control)
    if with_paper:
        cells += [_figure(row), *_difference(row.paper)]
    return cells


def _difference(comparison: Comparison | None) -> list[str]:
    if comparison is None:
        return ["–", "–"]
    return [interval(comparison.difference), comparison.verdict]


def not_as_in_the_paper(rows: Sequence[ReportRow]) -> str:
    """Return every key in which runs are not what the paper describes."""
    deviations: dict[str, None] = {}
    for row in rows:
        if row.published:
            deviations |= dict.fromkeys(row.published.deviations)
    return f"Not as in the paper: {'; '.join(deviations)}." if deviations else ""
