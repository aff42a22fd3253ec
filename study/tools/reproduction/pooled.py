"""All settings of a study together: every variant minus the control, seed by seed.

One setting has few seeds, and its differences are corrected over the whole report. Pooled, the
luck of single settings averages out. Of each data set the largest block of settings and seeds that
is whole counts, if it has two seeds: one seed shows no noise.
"""

from __future__ import annotations

import dataclasses

from fedglimpse.studies.report.numbers import interval
from fedglimpse.studies.results import Study
from reproduction.evidence import Evidence, Measure, contrast, early, final, proxy, swing
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
    """Return each variant minus the control; nothing where there is no control or one setting."""
    control, study = stored.results.control, stored.study
    if control is None or len(study.settings) < 2:
        return ""
    variants = [variant for variant in study.variants if variant != control]
    parts = [f"Settings together, minus `{control}`:", *_tables(study, variants, control)]
    if stored.name in MATCHED:
        second, others = MATCHED[stored.name]
        title = f"Those that do not average over time, minus `{second}`, which does not either:"
        parts += [title, *_tables(study, list(others), second)]
    return paragraphs([*parts, *_without_seeds_that_tuned(stored, variants, control)])


def _tables(study: Study, variants: list[str], control: str) -> list[str]:
    """Return the table, and that without data of two seeds, whose noise would cover the others'."""
    evidence, seeds = Evidence(study, {}), dict[str, set[int]]()
    for cell in study.cells:
        if cell.state == "finished":
            seeds.setdefault(evidence.data(cell.setting), set()).add(cell.seed)
    counts = {data: len(some) for data, some in seeds.items()}
    tables = [_table(study, variants, control)]
    if 2 in counts.values() and max(counts.values()) > 2:
        few = [data for data, count in counts.items() if count <= 2]
        cells = [cell for cell in study.cells if evidence.data(cell.setting) not in few]
        rest = _table(dataclasses.replace(study, cells=cells), variants, control)
        if rest != tables[0]:
            tables += [f"The same without {', '.join(few)}, of which two seeds were run:", rest]
    return tables


def _without_seeds_that_tuned(stored: Stored, variants: list[str], control: str) -> list[str]:
    """Show what is left without the seeds that chose the recipe, or say that nothing is."""
    if not stored.tuned_on:
        return []
    study, seeds = stored.study, " and ".join(map(str, sorted(stored.tuned_on)))
    rest = [cell for cell in study.cells if cell.seed not in stored.tuned_on]
    if len({cell.seed for cell in rest}) < 2:
        return [
            f"By seeds {seeds} the recipe was chosen too, among runs of `fedavg` and on the proxy "
            "score; without them one seed would be left."
        ]
    return [
        f"Settings together, minus `{control}`, without seeds {seeds}, which chose the recipe:",
        _table(dataclasses.replace(study, cells=rest), variants, control),
    ]


def _table(study: Study, variants: list[str], control: str) -> str:
    evidence = Evidence(study, {})
    columns = [_column(evidence, variants, control, measure) for measure in MEASURES.values()]
    rows = [[v, *cells] for v, *cells in zip(variants, *columns, strict=True)]
    return table(["variant", *MEASURES], rows)


def _column(evidence: Evidence, variants: list[str], control: str, measure: Measure) -> list[str]:
    differences = [_difference(evidence, variant, control, measure) for variant in variants]
    real = above_zero(differences)
    return [_cell(d, verdict) for d, verdict in zip(differences, real, strict=True)]


def _cell(difference: Pooled | None, verdict: Verdict) -> str:
    if difference is None:
        return "not run yet"
    seeds = "–".join(map(str, sorted(set(difference.seeds.values()))))
    return f"{interval(difference)}{MARKS.get(verdict, '')} ({difference.settings} × {seeds})"


def _difference(evidence: Evidence, variant: str, control: str, measure: Measure) -> Pooled | None:
    """Pool the largest block of each data set; data with one seed only where all have one."""
    found: dict[str, dict[str, set[int]]] = {}  # data -> setting -> seeds
    for s in evidence.study.settings:
        seeds = measure(evidence, (s, variant)).keys() & measure(evidence, (s, control)).keys()
        if seeds:
            found.setdefault(evidence.data(s), {})[s] = set(seeds)
    blocks = [_largest_block(seeds) for seeds in found.values()]
    if any(count > 1 for _, count in blocks):
        blocks = [(block, count) for block, count in blocks if count > 1]
    settings = [s for block, _ in blocks for s in block]
    return contrast(evidence, [((s, variant), (s, control)) for s in settings], measure)


def _largest_block(seeds: dict[str, set[int]]) -> tuple[list[str], int]:
    """Return the settings of the largest whole block, of two seeds if any is, and its seeds."""
    blocks = [[s for s in seeds if seeds[s] >= some] for some in seeds.values()]
    counted = [(block, len(shared([seeds[s] for s in block]))) for block in blocks]
    return max(counted, key=lambda one: (one[1] > 1, len(one[0]) * one[1], len(one[0])))
