"""Runs of a study that were repeated on another machine, beside the stored ones.

How far a run is from its repetition is shown beside how far two seeds of the same method are apart:
a repeated run should be much nearer to itself than to another seed.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from fedglimpse.studies.report.analysis import final_accuracies
from fedglimpse.studies.report.numbers import percent, signed
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.study import Study
from reproduction.markdown import paragraphs, table

HEADER = ["setting", "method", "seed", "stored %", "again %", "difference", "other seeds, farthest"]


def rerun(study: Study, folder: Path) -> str:
    """Return every run that a folder holds beside the same run of a study.

    A run whose stored twin was not run on a GPU is left out: it would say nothing of the device.
    """
    if not list(folder.glob("study*.json.gz")):
        return "Not run yet."
    rows: list[list[str]] = []
    changes: list[float] = []  # repeated minus stored
    seed_distances: list[float] = []  # between two seeds of one method in one setting
    for cell in load_study(folder).cells:
        stored_cells = [
            stored
            for stored in study.of(cell.setting, cell.variant)
            if stored.environment.get("gpu")
        ]
        accuracies = final_accuracies(stored_cells)
        repeated = final_accuracies([cell]).get(cell.seed)
        if repeated is None or cell.seed not in accuracies:
            continue
        for a, b in combinations(accuracies.values(), 2):
            seed_distances.append(abs(a - b))
        stored_accuracy = accuracies.pop(cell.seed)
        other_seeds = [abs(accuracy - stored_accuracy) for accuracy in accuracies.values()]
        changes.append(repeated - stored_accuracy)
        rows.append(
            [
                cell.setting,
                cell.variant,
                str(cell.seed),
                percent(stored_accuracy),
                percent(repeated),
                signed(repeated - stored_accuracy),
                percent(max(other_seeds)) if other_seeds else "–",
            ]
        )
    if not rows:
        return "Not run yet."
    return paragraphs([table(HEADER, rows), _summary(changes, seed_distances)])


def _summary(changes: list[float], seed_distances: list[float]) -> str:
    text = (
        f"{len(changes)} runs. Median distance between a run and its repetition: "
        f"{percent(median(map(abs, changes)), 2)} points"
    )
    if seed_distances:
        text += f"; two seeds of one method in one setting: {percent(median(seed_distances), 2)}"
    return (
        f"{text}. Again minus stored, mean: {signed(fmean(changes))} points (one seed, so no "
        "interval)."
    )
