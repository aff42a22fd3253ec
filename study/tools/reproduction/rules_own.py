"""Verdicts on what files of plans/ set out to test beyond the paper's own sentences."""

from __future__ import annotations

from statistics import fmean

from fedglimpse.studies.report.analysis import ReportRow, analyse, config_of
from fedglimpse.studies.report.numbers import interval
from reproduction.evidence import OURS, Evidence, contrast, final, over_each_baseline
from reproduction.pooling import Pooled, Values, pool
from reproduction.verdict import (
    Finding,
    Verdict,
    above_zero,
    all_of,
    any_of,
    largest,
    points,
    smallest,
)

REMOVED = (  # variants of components.toml without one of the parts that its claim names
    "no spatial attention",
    "no temporal attention",
    "one-step returns",
    "no averaging over time",
    "clients by scalars",
)

POINT = 0.01  # of accuracy
BY_LOSS = "power-of-choice"  # the clients with the highest loss, without an agent


def recipe_matters_more(evidence: Evidence) -> Finding:
    """Whether recipe and averaging move accuracy more than selection is said to.

    Holds if the gap between the best and the worst variant, pooled over settings, is significantly
    larger than the paper's own gain over its best baseline there, does not hold if all variants
    were run and the gap is significantly smaller, otherwise inconclusive; best and worst are chosen
    by the other seeds, so that luck does not widen the gap.
    """
    gaps, beyond, gains = dict[str, list[Values]](), dict[str, list[Values]](), list[float]()
    for setting in evidence.study.settings:
        found, published = _gaps(evidence, setting), evidence.published_gain(setting) or 0.0
        data = evidence.data(setting)
        gaps.setdefault(data, []).append(found)
        beyond.setdefault(data, []).append({s: gap - published for s, gap in found.items()})
        gains.append(published)
    verdict = above_zero([pool(beyond)])[0]
    if verdict is Verdict.FAILS and evidence.study.count("finished") < len(evidence.study.cells):
        verdict = Verdict.NOT_RUN
    said = f"best minus worst {points(pool(gaps))}"
    return Finding(verdict, f"{said}; the paper's gain {100 * fmean(gains):.1f} points")


def _gaps(evidence: Evidence, setting: str) -> Values:
    """Return seed -> accuracy of the variant that other seeds find best minus that of the worst."""
    variants = [final(evidence, (setting, v)) for v in evidence.study.variants]
    known = [values for values in variants if len(values) > 1]
    found = {}
    for seed in sorted({seed for values in known for seed in values}):
        here = [values for values in known if seed in values]
        ordered = sorted(here, key=lambda v: fmean(v[s] for s in v if s != seed))
        found[seed] = ordered[-1][seed] - ordered[0][seed]
    return found


def adam_explains_the_figures(evidence: Evidence) -> Finding:
    """Whether Adam gives the paper's baselines, and glimpse still wins.

    Holds if every baseline is within one published standard deviation of its published figure and
    not significantly different from it (the report's own comparison) and glimpse, pooled over
    settings, is significantly above each baseline and above the control, does not hold if a
    baseline is significantly different or glimpse is significantly below one of them, otherwise
    inconclusive.
    """
    rows = [r for r in analyse(evidence.study).rows if r.variant in evidence.baselines]
    near = [_near(row, below_only=False) for row in rows]
    settings, control = evidence.study.settings, str(evidence.study.control)
    above = over_each_baseline(evidence, settings)
    above[control] = contrast(evidence, [((s, OURS), (s, control)) for s in settings])
    verdict = all_of([*near, *above_zero(list(above.values()))])
    run = len(near) - near.count(Verdict.NOT_RUN)
    said = f"{near.count(Verdict.HOLDS)} of {run} figures are near, {len(near) - run} not run"
    return Finding(verdict, f"{said}; glimpse over others, {smallest(above)}")


def agent_beats_chance(evidence: Evidence) -> Finding:
    """Whether the agent is above a random choice.

    Holds if glimpse, pooled over settings, is significantly above the control, does not hold if it
    is significantly below, otherwise inconclusive.
    """
    found = _pooled(evidence, OURS, str(evidence.study.control))
    return Finding(above_zero([found])[0], points(found))


def presets_reach_the_paper(evidence: Evidence) -> Finding:
    """Whether either reading of the paper reaches its figure.

    Holds if in each setting one of the two presets of glimpse is no more than one published
    standard deviation below the published figure and not significantly below it (the report's own
    comparison), does not hold if both are significantly below in one setting, otherwise
    inconclusive.
    """
    each, said = [], []
    for setting in evidence.study.settings:
        rows = [
            row
            for row in analyse(evidence.study).of(setting)
            if row.published is not None and config_of(row.cells)["method"] == OURS
        ]
        each.append(any_of([_near(row, below_only=True) for row in rows]))
        for row in rows:
            if row.paper is not None:
                gap = interval(row.paper.difference)
                said.append(f"{row.variant} in {setting} {gap} points to the paper")
    return Finding(all_of(each), "; ".join(said) or "–")


def _near(row: ReportRow, below_only: bool) -> Verdict:
    """Say whether a row is near its published figure; `below_only`: above it is near as well."""
    if row.paper is None or row.published is None:
        return Verdict.NOT_RUN
    gap = row.paper.difference.mean
    if below_only and gap > 0 and row.paper.difference.pairs > 1:
        return Verdict.HOLDS
    if row.paper.significant:
        return Verdict.FAILS
    close = abs(gap) <= row.published.figure.std and row.paper.p is not None
    return Verdict.HOLDS if close else Verdict.INCONCLUSIVE


def every_component_adds(evidence: Evidence) -> Finding:
    """Whether each part of the agent is worth having.

    Holds if glimpse, pooled over settings, is significantly above itself without each of the parts
    that the claim names, does not hold if it is significantly below itself without one, otherwise
    inconclusive.
    """
    found = {
        v: contrast(evidence, [((s, OURS), (s, v)) for s in evidence.study.settings])
        for v in REMOVED
    }
    return Finding(all_of(above_zero(list(found.values()))), smallest(found))


def turns_make_up_for_the_harm(evidence: Evidence) -> Finding:
    """Whether the agent's choices do harm, and turns with a flat start mend it.

    Holds if glimpse, pooled over settings, is significantly below the control and each variant with
    turns significantly above glimpse, does not hold if glimpse is significantly above the control
    or such a variant significantly below glimpse, otherwise inconclusive.
    """
    control, turns = (
        str(evidence.study.control),
        [v for v in evidence.study.variants if "turns" in v],
    )
    found = {"harm": _pooled(evidence, control, OURS)}
    found |= {v: _pooled(evidence, v, OURS) for v in turns}
    said = f"{control} minus glimpse {points(found['harm'])}; over glimpse, "
    mended = {v: found[v] for v in turns}
    return Finding(all_of(above_zero(list(found.values()))), said + smallest(mended))


def changes_raise_accuracy(evidence: Evidence) -> Finding:
    """Whether the agent gains by seeing changes of the global model.

    Holds if glimpse that sees changes, pooled over settings, is significantly above glimpse, does
    not hold if it is significantly below, otherwise inconclusive; what its attention does is in the
    section's text.
    """
    found = _pooled(evidence, "glimpse, changes", OURS)
    return Finding(above_zero([found])[0], points(found))


def leaning_beats_chance(evidence: Evidence) -> Finding:
    """Whether an agent that leans towards a high loss is above a random choice.

    Holds if the leaning agent, pooled over settings, is significantly above the control, does not
    hold if it is significantly below, otherwise inconclusive.
    """
    found = _pooled(evidence, "glimpse, leaning", str(evidence.study.control))
    return Finding(above_zero([found])[0], points(found))


def proof_mends_the_harm(evidence: Evidence) -> Finding:
    """Whether Q that has to prove itself costs nothing, and with a lean gains.

    Holds if, pooled over settings, the agent that asks for proof is significantly above glimpse and
    significantly less than half a point below the control, and with a lean significantly above the
    control, does not hold if one of these goes significantly the other way, otherwise inconclusive.
    """
    control = str(evidence.study.control)
    over_glimpse = _pooled(evidence, "glimpse, proven", OURS)
    over_chance = _pooled(evidence, "glimpse, proven", control)
    leaning = _pooled(evidence, "glimpse, proven, leaning", control)
    spared = _pooled(evidence, "glimpse, proven", control, margin=-POINT / 2)
    said = f"proven over glimpse {points(over_glimpse)}, over {control} {points(over_chance)}"
    verdict = all_of(above_zero([over_glimpse, spared, leaning]))
    return Finding(verdict, f"{said}; leaning over {control} {points(leaning)}")


def teaching_pays(evidence: Evidence) -> Finding:
    """Whether a policy that others taught is worth more than chance, and than one's own lessons.

    Holds if, pooled over settings, the taught agent is significantly above the control and
    significantly above the same agent that learns in its own run, does not hold if one of these
    goes significantly the other way, otherwise inconclusive.
    """
    control = str(evidence.study.control)
    over_chance = _pooled(evidence, "glimpse, taught", control)
    over_own = _pooled(evidence, "glimpse, taught", "glimpse, untaught")
    said = f"taught over {control} {points(over_chance)}, over untaught {points(over_own)}"
    by_loss = points(_pooled(evidence, "glimpse, taught", BY_LOSS))
    verdict = all_of(above_zero([over_chance, over_own]))
    return Finding(verdict, f"{said}; over {BY_LOSS}, which learns nothing, {by_loss}")


def policy_travels(evidence: Evidence) -> Finding:
    """Whether a policy that one data set taught is worth more than chance on others.

    Holds if the taught agent, pooled over settings, is significantly above the control, does not
    hold if it is significantly below, otherwise inconclusive.
    """
    found = _pooled(evidence, "glimpse, taught", str(evidence.study.control))
    by_loss = points(_pooled(evidence, "glimpse, taught", BY_LOSS))
    return Finding(above_zero([found])[0], f"{points(found)}; over {BY_LOSS} {by_loss}")


def _pooled(evidence: Evidence, variant: str, other: str, margin: float = 0.0) -> Pooled | None:
    pairs = [((s, variant), (s, other)) for s in evidence.study.settings]
    return contrast(evidence, pairs, final, margin)


def choosing_is_worth_little(evidence: Evidence) -> Finding:
    """Whether a choice pays once everybody averages over time.

    Holds if for each variant the whole interval of its difference to the control, pooled over
    settings, lies below one point, does not hold if one is significantly above one point, otherwise
    inconclusive; fewer settings than planned: not run.
    """
    control = str(evidence.study.control)
    variants = [v for v in evidence.study.variants if v != control]
    found = {v: _pooled(evidence, v, control) for v in variants}
    beyond = above_zero([_pooled(evidence, v, control, margin=POINT) for v in variants])
    each = [_little(d, above) for d, above in zip(found.values(), beyond, strict=True)]
    return Finding(all_of(each), largest(found))


def _little(difference: Pooled | None, above_limit: Verdict) -> Verdict:
    if difference is None or above_limit is Verdict.HOLDS:
        return Verdict.NOT_RUN if difference is None else Verdict.FAILS
    below = difference.high is not None and difference.high < POINT
    return Verdict.HOLDS if below else Verdict.INCONCLUSIVE
