"""All settings of a study together: every variant minus the control, seed by seed.

One setting has few seeds, and its differences are corrected over the whole report. Pooled, every
seed of every setting is one pair, which tells small differences that single settings cannot.
"""

from __future__ import annotations

from fedglimpse.report.numbers import interval
from fedglimpse.stats.difference import Difference
from reproduction.evidence import Evidence, Measure, contrast, early, final, proxy, swing
from reproduction.markdown import table
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
    variants = [variant for variant in study.variants if variant != control]
    if control is None or len(study.settings) < 2:
        return ""
    evidence = Evidence(study, {})
    columns = [_column(evidence, variants, control, measure) for measure in MEASURES.values()]
    rows = [[v, *cells] for v, *cells in zip(variants, *columns, strict=True)]
    return f"{table(['variant', *MEASURES], rows)}\n\n{_legend(control)}"


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
    """Pool the settings in which both have a seed."""
    pairs = [((s, variant), (s, control)) for s in evidence.study.settings]
    shared = [
        pair
        for pair in pairs
        if measure(evidence, pair[0]).keys() & measure(evidence, pair[1]).keys()
    ]
    return contrast(evidence, shared, measure) if shared else None


def _legend(control: str) -> str:
    return (
        f"All settings together, in points: variant minus `{control}`, mean over all pairs of runs "
        "that share setting and seed, its bootstrap 95 % interval, and how many pairs. ▲ and ▼: "
        "really above and below, corrected over the column. A smaller swing is better. What is "
        "tuned is tuned on the proxy score."
    )
