"""CSV for further work, LaTeX for a paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from fedglimpse.runs.provenance import SOURCE
from fedglimpse.studies.report.analysis import Comparison, Results, Row
from fedglimpse.studies.report.numbers import MEASURES, percent

_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)


def rows_csv(results: Results) -> str:
    """Return one line for each setting and variant."""
    return _csv([_row(results, row) for row in results.rows])


def cells_csv(results: Results) -> str:
    """Return one line for each cell: the exact values behind every mean."""
    lines = []
    for row in results.rows:
        target = results.targets.get(row.setting)
        for cell in row.cells:
            line: dict[str, Any] = {
                "setting": cell.setting,
                "variant": cell.variant,
                "seed": cell.seed,
                "state": cell.state,
                "reason": cell.reason,
            }
            facts, part = cell.facts, cell.participation
            for name in ("accuracy", "macro_f1", "over_rounds", "best", "rejected", "seconds"):
                line[name] = getattr(facts, name, None)
            line["target"] = None if target is None else target.value
            for measure in MEASURES:
                spent = facts.climb.spent(measure, target.value) if facts and target else None
                line[f"{measure}_to_target"] = spent.amount if spent and spent.reached else None
                line[f"{measure}_at_end"] = (
                    facts.climb.spent(measure, 2.0).amount if facts else None
                )
            line["jain"] = part.jain if part else None
            line["classes_covered"] = part.classes_covered if part else None
            line["source"] = cell.environment.get(SOURCE)
            lines.append(line)
    return _csv(lines)


def latex(results: Results) -> str:
    """Return a booktabs table of final accuracies: settings down, variants across."""
    variants = results.study.variants
    head = " & ".join(["Setting", *(v.translate(_LATEX) for v in variants)])
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{tabular}{@{}l" + "r" * len(variants) + r"@{}}",
        r"\toprule",
        head + r" \\",
        r"\midrule",
    ]
    for setting in results.study.settings:
        rows = {row.variant: row for row in results.of(setting)}
        shown = [_latex_cell(rows.get(variant)) for variant in variants]
        lines.append(" & ".join([setting.translate(_LATEX), *shown]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}", f"% {_caption(results)}"]
    return "\n".join(lines) + "\n"


def _caption(results: Results) -> str:
    text = "Mean and standard deviation over seeds of the accuracy (%) over the last rounds. "
    text += "Bold: the highest mean of a setting."
    if results.control:
        text += f" Dagger: differs from {results.control} (paired by seed, Holm-corrected)."
    return text


def _latex_cell(row: Row | None) -> str:
    if row is None or row.spread is None:
        return "--"
    text = percent(row.spread.mean, 2)
    if row.spread.std is not None:
        text += rf"\(\pm\){percent(row.spread.std, 2)}"
    if row.best:
        text = rf"\textbf{{{text}}}"
    real = row.control is not None and row.control.verdict == "real"
    return text + (r"\(^\dagger\)" if real else "")


def _row(results: Results, row: Row) -> dict[str, Any]:
    spread, target, fair = row.spread, results.targets.get(row.setting), row.fairness
    line: dict[str, Any] = {
        "setting": row.setting,
        "variant": row.variant,
        "seeds_planned": len(row.cells),
        "seeds_finished": row.finished,
        "accuracy": spread.mean if spread else None,
        "std_over_seeds": spread.std if spread else None,
        "t_half_width_95": spread.over_seeds.half_width if spread else None,
        "std_over_rounds": spread.over_rounds if spread else None,
        "control": results.control,
        **_comparison("control", row.control),
        "paper_accuracy": row.beside.figure.mean if row.beside else None,
        "paper_std": row.beside.figure.std if row.beside else None,
        **_comparison("paper", row.paper),
        "differs_from_paper": "; ".join(row.beside.deviations) if row.beside else None,
        "target": target.value if target else None,
        "target_given": target.given if target else None,
    }
    for measure in MEASURES:
        cost, saved = row.to_target.get(measure), row.savings.get(measure)
        line[f"{measure}_to_target"] = cost.at_least if cost else None
        line[f"{measure}_is"] = None if cost is None else "exact" if cost.exact else "at least"
        line[f"{measure}_reached"] = cost.reached if cost else None
        line[f"{measure}_median"] = cost.median if cost else None
        line[f"{measure}_saving"] = saved.share if saved and saved.bound != "?" else None
        line[f"{measure}_saving_bound"] = saved.bound if saved else None
    for name in ("jain", "jain_of_seen", "fewest", "median", "most", "never", "classes_covered"):
        line[f"visits_{name}" if name in ("fewest", "median", "most") else name] = (
            getattr(fair, name) if fair else None
        )
    return {**line, "command": row.command}


def _comparison(name: str, found: Comparison | None) -> dict[str, Any]:
    d = found.difference if found else None
    return {
        f"minus_{name}": d.mean if d else None,
        f"minus_{name}_low": d.low if d else None,
        f"minus_{name}_high": d.high if d else None,
        f"minus_{name}_p_holm": found.p if found else None,
        f"minus_{name}_verdict": found.verdict if found else None,
    }


def _csv(lines: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]) if lines else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()
