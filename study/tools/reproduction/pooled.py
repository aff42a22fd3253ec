"""All settings of a study together: every variant minus the control, seed by seed.

One setting has few seeds, and its differences are corrected over the whole report. Pooled, the
luck of single settings averages out. Of each data set the largest block of settings and seeds
without a gap counts, if it has two seeds: one seed shows no noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fedglimpse.studies.report.numbers import interval
from fedglimpse.studies.results.study import Study
from reproduction.evidence import (
    Evidence,
    Measure,
    early,
    final,
    in_every_setting,
    proxy,
    swing,
)
from reproduction.markdown import paragraphs, table
from reproduction.pooling import Pooled, shared
from reproduction.shelf import Stored
from reproduction.verdict import Verdict, above_zero

MEASURES: dict[str, Measure] = {
    "final accuracy": final,
    "accuracy in the first tenth of the rounds": early,
    "swing over the last 50 rounds": swing,
    "proxy score": proxy,
}
MARKS = {Verdict.HOLDS: " ▲", Verdict.FAILS: " ▼"}
MATCHED = {  # study -> a second control, and the variants that like it do not average over time
    "table1": ("fedavg", ("fedprox", "ha-edgeflow", "f3ast", "herd", "dpp", "oracle-balance")),
}


def pooled(stored: Stored) -> str:
    """Return each variant minus the control; empty if there is no control or one setting."""
    control = stored.results.control
    study = stored.study
    if control is None or len(study.settings) < 2:
        return ""
    variants = [variant for variant in study.variants if variant != control]
    texts = [f"Settings together, minus `{control}`:", *_tables(study, variants, control)]
    if stored.name in MATCHED:
        second_control, matched = MATCHED[stored.name]
        texts.append(
            f"Those that do not average over time, minus `{second_control}`, which does not either:"
        )
        texts += _tables(study, matched, second_control)
    return paragraphs([*texts, *_without_tuning_seeds(stored, variants, control)])


def _tables(study: Study, variants: Sequence[str], control: str) -> list[str]:
    """Return the table, and that without data of two seeds, whose noise would hide the others'."""
    evidence = Evidence(study, {})
    seeds_of: dict[str, set[int]] = {}
    for cell in study.cells:
        if cell.state == "finished":
            seeds_of.setdefault(evidence.data(cell.setting), set()).add(cell.seed)
    counts = [len(seeds) for seeds in seeds_of.values()]
    full = _table(study, variants, control)
    if 2 not in counts or max(counts) <= 2:
        return [full]
    few = [data for data, seeds in seeds_of.items() if len(seeds) <= 2]
    cells = [cell for cell in study.cells if evidence.data(cell.setting) not in few]
    without_few = _table(dataclasses.replace(study, cells=cells), variants, control)
    if without_few == full:
        return [full]
    title = f"The same without {', '.join(few)}, of which two seeds were run:"
    return [full, title, without_few]


def _without_tuning_seeds(stored: Stored, variants: Sequence[str], control: str) -> list[str]:
    """Return the table without the seeds that chose the recipe, or say why there is none."""
    if not stored.tuned_on:
        return []
    seeds = " and ".join(map(str, sorted(stored.tuned_on)))
    cells = [cell for cell in stored.study.cells if cell.seed not in stored.tuned_on]
    study = dataclasses.replace(stored.study, cells=cells)
    if len(study.seeds) < 2:
        return [
            f"By seeds {seeds} the recipe was chosen too, among runs of `fedavg` and on the proxy "
            "score; without them one seed would be left."
        ]
    return [
        f"Settings together, minus `{control}`, without seeds {seeds}, which chose the recipe:",
        _table(study, variants, control),
    ]


def _table(study: Study, variants: Sequence[str], control: str) -> str:
    evidence = Evidence(study, {})
    columns: list[Sequence[str]] = [variants]
    for measure in MEASURES.values():
        columns.append(_column(evidence, variants, control, measure))
    return table(["variant", *MEASURES], zip(*columns, strict=True))


def _column(
    evidence: Evidence, variants: Sequence[str], control: str, measure: Measure
) -> list[str]:
    differences = [_difference(evidence, variant, control, measure) for variant in variants]
    cells: list[str] = []
    for difference, verdict in zip(differences, above_zero(differences), strict=True):
        cells.append(_cell(difference, verdict))
    return cells


def _cell(difference: Pooled | None, verdict: Verdict) -> str:
    if difference is None:
        return "not run yet"
    seeds = "–".join(map(str, sorted(set(difference.seeds.values()))))
    return f"{interval(difference)}{MARKS.get(verdict, '')} ({difference.settings} × {seeds})"


def _difference(evidence: Evidence, variant: str, control: str, measure: Measure) -> Pooled | None:
    """Pool the largest block of each data set; data with one seed only if all have one."""
    seeds_of: dict[str, dict[str, set[int]]] = {}  # data -> setting -> seeds
    for setting in evidence.study.settings:
        values = measure(evidence, (setting, variant))
        seeds = values.keys() & measure(evidence, (setting, control)).keys()
        if seeds:
            seeds_of.setdefault(evidence.data(setting), {})[setting] = set(seeds)
    blocks = list(map(_largest_block, seeds_of.values()))
    several_seeds = [(settings, seeds) for settings, seeds in blocks if seeds > 1]
    chosen: list[str] = []
    for settings, _ in several_seeds or blocks:
        chosen += settings
    return in_every_setting(evidence, variant, control, measure, settings=chosen)


def _largest_block(seeds_of: Mapping[str, set[int]]) -> tuple[list[str], int]:
    """Return the settings of the largest block without a gap, and how many seeds it has.

    A block of two seeds or more is preferred.
    """
    largest: tuple[list[str], int] = ([], 0)
    largest_size = (False, 0, 0)
    for seeds in seeds_of.values():
        settings = [setting for setting in seeds_of if seeds_of[setting] >= seeds]
        count = len(shared([seeds_of[setting] for setting in settings]))
        size = (count > 1, len(settings) * count, len(settings))
        if size > largest_size:
            largest = (settings, count)
            largest_size = size
    return largest
