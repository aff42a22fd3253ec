"""A report as tables: in a terminal, as CSV for further work, as LaTeX for a paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedglimpse.runs.provenance import SOURCE, draws_of
from fedglimpse.studies.report.analysis import (
    MEASURES,
    Comparison,
    ReportRow,
    Results,
    Target,
)
from fedglimpse.studies.report.numbers import cost, mean_and_std, percent, t_interval
from fedglimpse.studies.results.study import CellResult
from fedglimpse.studies.statistics.to_target import UNKNOWN

Line = dict[str, Any]
NEVER_REACHED = 2.0  # an accuracy that no run reaches: the cost "to" it is that of the whole run
FAIRNESS_COLUMNS = {  # column -> attribute
    "jain": "jain",
    "jain_of_seen": "jain_of_seen",
    "visits_fewest": "fewest",
    "visits_median": "median",
    "visits_most": "most",
    "never": "never",
    "classes_covered": "classes_covered",
}
LATEX_ESCAPES = str.maketrans(
    {
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
    }
)
LEGEND = (
    "Differences are in percentage points, paired by seed, with a 95 % t interval. Significant: "
    "p < 0.05 after Holm's correction, and a bootstrap 95 % interval without zero."
)


def rows_csv(results: Results) -> str:
    """Return one line for each setting and variant."""
    return _csv([_row_line(results, row) for row in results.rows])


def cells_csv(results: Results) -> str:
    """Return one line for each cell: the exact values behind every mean."""
    lines: list[Line] = []
    for row in results.rows:
        target = results.targets.get(row.setting)
        for cell in row.cells:
            lines.append(_cell_line(cell, target))
    return _csv(lines)


def _cell_line(cell: CellResult, target: Target | None) -> Line:
    facts = cell.facts
    participation = cell.participation
    line: Line = {
        "setting": cell.setting,
        "variant": cell.variant,
        "seed": cell.seed,
        "state": cell.state,
        "reason": cell.reason,
    }
    for name in ("accuracy", "macro_f1", "over_rounds", "best", "rejected", "seconds"):
        line[name] = getattr(facts, name, None)
    line["target"] = None if target is None else target.value
    for measure in MEASURES:
        spent = facts.climb.spent(measure, target.value) if facts and target else None
        total = facts.climb.spent(measure, NEVER_REACHED) if facts else None
        line[f"{measure}_to_target"] = spent.amount if spent and spent.reached else None
        line[f"{measure}_at_end"] = total.amount if total else None
    line["jain"] = participation.jain if participation else None
    line["classes_covered"] = participation.classes_covered if participation else None
    late = cell.latecomers or {}
    line["latecomers"] = late.get("clients")
    line["accuracy_on_latecomers"] = late.get("accuracy")
    line["accuracy_on_first"] = late.get("accuracy_of_first")
    line["source"] = cell.environment.get(SOURCE)
    return line


def latex(results: Results) -> str:
    """Return a booktabs table of final accuracies: settings down, variants across."""
    variants = results.study.variants
    header = " & ".join(["Setting", *(variant.translate(LATEX_ESCAPES) for variant in variants)])
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{tabular}{@{}l" + "r" * len(variants) + r"@{}}",
        r"\toprule",
        header + r" \\",
        r"\midrule",
    ]
    for setting in results.study.settings:
        rows = {row.variant: row for row in results.of(setting)}
        accuracies = [_latex_accuracy(rows.get(variant)) for variant in variants]
        lines.append(" & ".join([setting.translate(LATEX_ESCAPES), *accuracies]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", f"% {_caption(results)}"]
    return "\n".join(lines) + "\n"


def _caption(results: Results) -> str:
    text = "Mean and standard deviation over seeds of the accuracy (%) over the last rounds. "
    text += "Bold: the highest mean of a setting."
    if results.control:
        text += f" Dagger: differs significantly from {results.control} (paired by seed, "
        text += "Holm-corrected)."
    return text


def _latex_accuracy(row: ReportRow | None) -> str:
    if row is None or row.spread is None:
        return "--"
    text = percent(row.spread.mean, 2)
    if row.spread.std is not None:
        text += rf"\(\pm\){percent(row.spread.std, 2)}"
    if row.best:
        text = rf"\textbf{{{text}}}"
    if row.control is not None and row.control.significant:
        text += r"\(^\dagger\)"
    return text


def _row_line(results: Results, row: ReportRow) -> Line:
    spread = row.spread
    published = row.published
    target = results.targets.get(row.setting)
    line: Line = {
        "setting": row.setting,
        "variant": row.variant,
        "seeds_planned": len(row.cells),
        "seeds_finished": row.finished,
        "accuracy": spread.mean if spread else None,
        "std_over_seeds": spread.std if spread else None,
        "t_half_width_95": spread.over_seeds.half_width if spread else None,
        "std_over_rounds": spread.over_rounds if spread else None,
        "control": results.control,
        **_comparison_columns("control", row.control),
        "paper_accuracy": published.figure.mean if published else None,
        "paper_std": published.figure.std if published else None,
        **_comparison_columns("paper", row.paper),
        "differs_from_paper": "; ".join(published.deviations) if published else None,
        "target": target.value if target else None,
        "target_given": target.given if target else None,
        **_cost_columns(row),
    }
    for column, attribute in FAIRNESS_COLUMNS.items():
        line[column] = getattr(row.fairness, attribute, None)
    return {**line, "command": row.command}


def _cost_columns(row: ReportRow) -> Line:
    columns: Line = {}
    for measure in MEASURES:
        to_target = row.to_target.get(measure)
        kind = None
        if to_target:
            kind = "exact" if to_target.exact else "at least"
        columns[f"{measure}_to_target"] = to_target.at_least if to_target else None
        columns[f"{measure}_is"] = kind
        columns[f"{measure}_reached"] = to_target.reached if to_target else None
        columns[f"{measure}_median"] = to_target.median if to_target else None
        saving = row.savings.get(measure)
        is_known = saving is not None and saving.bound != UNKNOWN
        columns[f"{measure}_saving"] = saving.share if saving and is_known else None
        columns[f"{measure}_saving_bound"] = saving.bound if saving else None
    return columns


def _comparison_columns(name: str, comparison: Comparison | None) -> Line:
    difference = comparison.difference if comparison else None
    return {
        f"minus_{name}": difference.mean if difference else None,
        f"minus_{name}_t_half_width_95": difference.t_half_width if difference else None,
        f"minus_{name}_low": difference.low if difference else None,
        f"minus_{name}_high": difference.high if difference else None,
        f"minus_{name}_p_holm": comparison.p if comparison else None,
        f"minus_{name}_verdict": comparison.verdict if comparison else None,
    }


def _csv(lines: Sequence[Line]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]) if lines else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


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
    for line in latecomers(results):
        console.print(escape(line), highlight=False)
    for line in (*missing(results), *diverged(results), *drawn_differently(results)):
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


def latecomers(results: Results) -> list[str]:
    """Return one line for every row with clients that came after round 0."""
    lines: list[str] = []
    for row, means in results.with_latecomers:
        lines.append(
            f"late-comers: {row.setting}, {row.variant}: {percent(means['accuracy'])} % on the "
            f"examples of {means['clients']:.0f} clients that came after round 0, "
            f"{percent(means['accuracy_of_first'])} % on those of the first clients"
        )
    return lines


def missing(results: Results) -> list[str]:
    """Return one line for every cell that has not finished."""
    lines: list[str] = []
    for cell in results.study.cells:
        if cell.state != "finished":
            reason = f" ({cell.reason})" if cell.reason else ""
            lines.append(f"{cell.state}: {cell.setting}, {cell.variant}, seed {cell.seed}{reason}")
    return lines


def drawn_differently(results: Results) -> list[str]:
    """Return one line for every setting whose runs do not share their random draws."""
    lines: list[str] = []
    for setting in results.study.settings:
        versions: set[int] = set()
        for row in results.of(setting):
            for cell in row.cells:
                if cell.state == "finished":
                    versions.add(draws_of(cell.environment))
        if len(versions) > 1:
            known = " and ".join(map(str, sorted(versions)))
            lines.append(
                f"draws: {setting} has runs with versions {known} of the random draws, which do "
                "not share partitions, so that their differences are not paired"
            )
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
