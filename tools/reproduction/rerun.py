"""Runs of a study that were played again elsewhere, beside what is stored of them.

The rule, written down before the first of them was played: a run is reproduced if the new final
accuracy is no farther from the stored one of the same seed than 95 % of single seeds lie from their
mean, t times the standard deviation over the stored seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import stdev

from scipy.stats import t as student

from fedglimpse.report.analysis import final_accuracies
from fedglimpse.report.numbers import interval, percent, signed
from fedglimpse.stats.difference import paired
from fedglimpse.study import Cell, Study, load_study
from reproduction.markdown import paragraphs, table

HEAD = ["setting", "method", "seed", "stored %", "again %", "difference", "allowed", ""]


def rerun(study: Study, folder: Path) -> str:
    """Return every run that a folder holds beside the same run of a study."""
    if not list(folder.glob("study*.json.gz")):
        return "Not run yet."
    rows, stored, again = list[list[str]](), dict[int, float](), dict[int, float]()
    for cell in load_study(folder).cells:
        seeds = final_accuracies(study.of(cell.setting, cell.variant))
        new = final_accuracies([cell]).get(cell.seed)
        if new is None or cell.seed not in seeds:
            continue
        stored[len(rows)], again[len(rows)] = seeds[cell.seed], new
        rows.append(_row(cell, seeds, new))
    difference = paired(again, stored)
    if difference is None:
        return "Not run yet."
    fine = sum(row[-1] == "reproduced" for row in rows)
    return paragraphs(
        [
            table(HEAD, rows),
            f"{fine} of {len(rows)} reproduced. All of them, again minus stored: "
            f"{interval(difference)} points.",
        ]
    )


def _row(cell: Cell, seeds: Mapping[int, float], new: float) -> list[str]:
    away, allowed = new - seeds[cell.seed], _allowed(list(seeds.values()))
    verdict = "one seed stored" if allowed is None else "not reproduced"
    if allowed is not None and abs(away) <= allowed:
        verdict = "reproduced"
    return [
        cell.setting,
        cell.variant,
        str(cell.seed),
        percent(seeds[cell.seed]),
        percent(new),
        signed(away),
        "–" if allowed is None else percent(allowed),
        verdict,
    ]


def _allowed(values: list[float]) -> float | None:
    """Return how far 95 % of single seeds lie from their mean at most."""
    if len(values) < 2:
        return None
    return stdev(values) * float(student.ppf(0.975, len(values) - 1))
