"""CSV for further work, LaTeX for a paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from fedglimpse.runs.provenance import SOURCE
from fedglimpse.studies.report.analysis import (
    MEASURES,
    Comparison,
    ReportRow,
    Results,
    Target,
)
from fedglimpse.studies.report.numbers import percent
from fedglimpse.studies.results import CellResult
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
        cost = row.to_target.get(measure)
        saving = row.savings.get(measure)
        kind = None
        if cost:
            kind = "exact" if cost.exact else "at least"
        columns[f"{measure}_to_target"] = cost.at_least if cost else None
        columns[f"{measure}_is"] = kind
        columns[f"{measure}_reached"] = cost.reached if cost else None
        columns[f"{measure}_median"] = cost.median if cost else None
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
