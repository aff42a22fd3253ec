"""The report in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedglimpse.studies.report.analysis import Comparison, Results, Row
from fedglimpse.studies.report.numbers import (
    MEASURES,
    cost,
    covers,
    interval,
    mean_and_std,
    percent,
)

STYLES = {"real": "bold", "within noise": "dim", "cannot tell": "dim"}


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
        told = "Differences are in points, seed by seed, with a bootstrap 95 % interval"
        console.print(f"\n{told} that {covers()}.", style="dim", highlight=False)
    for line in (*missing(results), *diverged(results)):
        console.print(escape(line), style="yellow")


def _table(results: Results, setting: str) -> Table:
    target, rows = results.targets.get(setting), results.of(setting)
    with_paper = any(row.beside for row in rows)
    table = Table(title=escape(setting), title_justify="left", box=None, pad_edge=False)
    table.add_column("variant")
    table.add_column("accuracy %", justify="right")
    table.add_column("over rounds", justify="right")
    table.add_column("seeds", justify="right")
    table.add_column(f"against {escape(results.control)}" if results.control else "")
    if with_paper:
        table.add_column("paper")
    goal = "" if target is None else f" to {percent(target.value)} %"
    table.add_column(f"rounds{goal}", justify="right")
    table.add_column(f"uplink{goal}", justify="right")
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        table.add_row(*_cells(row, with_paper, results.control))
    return table


def _cells(row: Row, with_paper: bool, control: str | None) -> list[str]:
    spread = row.spread
    name = f"[bold]{escape(row.variant)}[/bold]" if row.best else escape(row.variant)
    against = "control" if row.variant == control else verdict_text(row.control)
    cells = [
        name + (" (oracle)" if row.oracle else ""),
        "–" if spread is None else mean_and_std(spread),
        "–" if spread is None else percent(spread.over_rounds),
        f"{row.finished}/{len(row.cells)}",
        against,
    ]
    if with_paper:
        figure = row.beside.figure if row.beside else None
        ours = "–" if figure is None else f"{percent(figure.mean)} ± {percent(figure.std)}: "
        cells.append(ours + (verdict_text(row.paper) if figure else ""))
    for measure in ("rounds", "uplink_bytes"):
        found = row.to_target.get(measure)
        cells.append("–" if found is None else cost(found, MEASURES[measure][1]))
    return cells


def verdict_text(comparison: Comparison | None) -> str:
    """Return the interval and its verdict, styled for rich."""
    if comparison is None:
        return "–"
    style = STYLES[comparison.verdict]
    return f"{interval(comparison.difference)} [{style}]{comparison.verdict}[/{style}]"


def missing(results: Results) -> list[str]:
    """Return one line for every cell that has not finished."""
    return [
        f"{cell.state}: {cell.setting}, {cell.variant}, seed {cell.seed}"
        + (f" ({cell.reason})" if cell.reason else "")
        for cell in results.study.cells
        if cell.state != "finished"
    ]


def diverged(results: Results) -> list[str]:
    """Return one line for every cell with scores that are no finite numbers."""
    return [
        f"diverged: {cell.setting}, {cell.variant}, seed {cell.seed} ({cell.facts.diverged} "
        "rounds with a score that is not finite, which counts as 0)"
        for cell in results.study.cells
        if cell.facts is not None and cell.facts.diverged
    ]
