"""Runs of a study that were played again elsewhere, beside what is stored of them.

How far a run is from itself is said beside how far two seeds of the same method are apart: a run
that is played again should be much nearer to itself than to another seed.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import fmean, median

from fedglimpse.studies.report.analysis import final_accuracies
from fedglimpse.studies.report.numbers import percent, signed
from fedglimpse.studies.results import Study, load_study
from reproduction.markdown import paragraphs, table

HEAD = ["setting", "method", "seed", "stored %", "again %", "difference", "other seeds, farthest"]


def rerun(study: Study, folder: Path) -> str:
    """Return every run that a folder holds beside the same run of a study.

    A run whose stored twin was not played on a GPU is left out: it would say nothing of the device.
    """
    if not list(folder.glob("study*.json.gz")):
        return "Not run yet."
    rows, stored, again, apart = list[list[str]](), dict[int, float](), dict[int, float](), []
    for cell in load_study(folder).cells:
        twins = [c for c in study.of(cell.setting, cell.variant) if c.environment.get("gpu")]
        seeds, new = final_accuracies(twins), final_accuracies([cell]).get(cell.seed)
        if new is None or cell.seed not in seeds:
            continue
        old = seeds[cell.seed]
        others = [abs(value - old) for seed, value in seeds.items() if seed != cell.seed]
        apart += [abs(a - b) for a, b in combinations(seeds.values(), 2)]
        stored[len(rows)], again[len(rows)] = old, new
        named = [cell.setting, cell.variant, str(cell.seed)]
        farthest = percent(max(others)) if others else "–"
        rows.append([*named, percent(old), percent(new), signed(new - old), farthest])
    if not rows:
        return "Not run yet."
    difference = fmean(again[i] - stored[i] for i in stored)
    itself = median(abs(again[i] - stored[i]) for i in stored)
    beside = (
        f"; two seeds of one method in one setting: {percent(median(apart), 2)}" if apart else ""
    )
    return paragraphs(
        [
            table(HEAD, rows),
            f"{len(rows)} runs. Median distance between a run and itself played again: "
            f"{percent(itself, 2)} points{beside}. Again minus stored, mean: "
            f"{signed(difference)} points (one seed, so no interval).",
        ]
    )
