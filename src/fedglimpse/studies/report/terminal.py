"""The report in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedglimpse.studies.report.analysis import MEASURES, Comparison, ReportRow, Results
from fedglimpse.studies.report.numbers import cost, mean_and_std, percent, t_interval

LEGEND = (
    "Differences are in percentage points, paired by seed, with a 95 % t interval. Significant: "
    "p < 0.05 after Holm's correction, and a bootstrap 95 % interval without zero."
)


def show(results: Results, console: Console) -> None:
    """Print one table for each setting, how to read it, then what is missing."""
    study = results.study
    console.print(f"[bold]{escape(study.title)}[/bold]")
    if study.claim:
        console.print(escape(study.claim))
    for setting in study.settings:
        console.print()
        console.print(_table(results, setting))
    if any(row.control for row in results.rows):
        console.print(f"\n{LEGEND}", style="dim", highlight=False)
    for line in (*missing(results), *diverged(results)):
        console.print(escape(line), style="yellow")


def _table(results: Results, setting: str) -> Table:
    target = results.targets.get(setting)
    rows = results.of(setting)
    with_paper = any(row.published for row in rows)
    table = Table(title=escape(setting), title_justify="left", box=None, pad_edge=False)
    table.add_column("variant")
    table.add_column("accuracy %", justify="right")
    table.add_column("over rounds", justify="right")
    table.add_column("seeds", justify="right")
    table.add_column(f"minus {escape(results.control)}" if results.control else "")
    if with_paper:
        table.add_column("paper")
    suffix = "" if target is None else f" to {percent(target.value)} %"
    table.add_column(f"rounds{suffix}", justify="right")
    table.add_column(f"uplink{suffix}", justify="right")
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        table.add_row(*_columns(row, with_paper, results.control))
    return table


def _columns(row: ReportRow, with_paper: bool, control: str | None) -> list[str]:
    spread = row.spread
    name = f"[bold]{escape(row.variant)}[/bold]" if row.best else escape(row.variant)
    columns = [
        name + (" (oracle)" if row.oracle else ""),
        "–" if spread is None else mean_and_std(spread),
        "–" if spread is None else percent(spread.over_rounds),
        f"{row.finished}/{len(row.cells)}",
        "control" if row.variant == control else _comparison(row.control),
    ]
    if with_paper:
        columns.append(_paper(row))
    for measure in ("rounds", "uplink_bytes"):
        to_target = row.to_target.get(measure)
        columns.append("–" if to_target is None else cost(to_target, MEASURES[measure][1]))
    return columns


def _paper(row: ReportRow) -> str:
    if row.published is None:
        return "–"
    figure = row.published.figure
    return f"{percent(figure.mean)} ± {percent(figure.std)}: {_comparison(row.paper)}"


def _comparison(comparison: Comparison | None) -> str:
    """Return the difference, its interval and the verdict, styled for rich."""
    if comparison is None:
        return "–"
    style = "bold" if comparison.significant else "dim"
    return f"{t_interval(comparison.difference)} [{style}]{comparison.in_words}[/{style}]"


def missing(results: Results) -> list[str]:
    """Return one line for every cell that has not finished."""
    lines: list[str] = []
    for cell in results.study.cells:
        if cell.state != "finished":
            reason = f" ({cell.reason})" if cell.reason else ""
            lines.append(f"{cell.state}: {cell.setting}, {cell.variant}, seed {cell.seed}{reason}")
    return lines


def diverged(results: Results) -> list[str]:
    """Return one line for every cell with scores that are not finite numbers."""
    lines: list[str] = []
    for cell in results.study.cells:
        if cell.facts is not None and cell.facts.diverged:
            lines.append(
                f"diverged: {cell.setting}, {cell.variant}, seed {cell.seed} "
                f"({cell.facts.diverged} rounds with a score that is not finite, which counts as 0)"
            )
    return lines
