"""All settings of a study together: every variant minus the control, seed by seed.

One setting has few seeds, and its differences are corrected over the whole report. Pooled, every
seed of every setting is one pair, which tells small differences that single settings cannot.
Settings count alike: where some were run further, the table is of the largest block of settings
and seeds that is whole.
"""

from __future__ import annotations

import dataclasses

from fedglimpse.report.numbers import interval
from fedglimpse.stats.difference import Difference
from fedglimpse.study import Study
from reproduction.evidence import Evidence, Measure, contrast, early, final, proxy, shared, swing
from reproduction.markdown import paragraphs, table
from reproduction.shelf import Stored
from reproduction.verdict import Verdict, above_zero

MEASURES: dict[str, Measure] = {
    "final accuracy": final,
    "accuracy in the first tenth of the rounds": early,
    "swing over the last 50 rounds": swing,
    "proxy score": proxy,
}
MARKS = {Verdict.HOLDS: " ▲", Verdict.FAILS: " ▼"}


def pooled(stored: Stored) -> str:
    """Return each variant minus the control; nothing where there is no control or one setting."""
    control, study = stored.results.control, stored.study
    if control is None or len(study.settings) < 2:
        return ""
    parts = [_table(study, control), _legend(control)]
    if stored.tuned_on:
        rest = [cell for cell in study.cells if cell.seed not in stored.tuned_on]
        seeds = " and ".join(map(str, sorted(stored.tuned_on)))
        parts += [
            f"The same without seeds {seeds}, on which the recipe was chosen:",
            _table(dataclasses.replace(study, cells=rest), control),
        ]
    return paragraphs(parts)


def _table(study: Study, control: str) -> str:
    variants = [variant for variant in study.variants if variant != control]
    evidence = Evidence(study, {})
    columns = [_column(evidence, variants, control, measure) for measure in MEASURES.values()]
    rows = [[v, *cells] for v, *cells in zip(variants, *columns, strict=True)]
    return table(["variant", *MEASURES], rows)


def _column(evidence: Evidence, variants: list[str], control: str, measure: Measure) -> list[str]:
    differences = [_difference(evidence, variant, control, measure) for variant in variants]
    real = above_zero(differences)
    return [
        "not run yet" if d is None else f"{interval(d)}{MARKS.get(verdict, '')} ({d.pairs})"
        for d, verdict in zip(differences, real, strict=True)
    ]


def _difference(
    evidence: Evidence, variant: str, control: str, measure: Measure
) -> Difference | None:
    """Pool the settings that make up the largest block of settings and seeds."""
    seeds = {
        s: measure(evidence, (s, variant)).keys() & measure(evidence, (s, control)).keys()
        for s in evidence.study.settings
    }
    blocks = [[s for s in seeds if seeds[s] >= some] for some in seeds.values() if some]
    sizes = [(len(block) * len(shared([seeds[s] for s in block])), len(block)) for block in blocks]
    if not blocks:
        return None
    block = blocks[sizes.index(max(sizes))]
    return contrast(evidence, [((s, variant), (s, control)) for s in block], measure)


def _legend(control: str) -> str:
    return (
        f"Settings together, in points: variant minus `{control}`, mean over pairs of runs that "
        "share setting and seed, its bootstrap 95 % interval, and how many pairs. Where some "
        "settings have more seeds than others, the largest whole block of settings and seeds "
        "counts. ▲ and ▼: really above and below, corrected over the column. A smaller swing is "
        "better. What is tuned is tuned on the proxy score."
    )
