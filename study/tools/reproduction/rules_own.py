"""Verdicts on what files of plans/ set out to test beyond the paper's own sentences."""

from __future__ import annotations

from statistics import fmean

from fedglimpse.studies.report.analysis import ReportRow, analyse, config_of
from fedglimpse.studies.report.numbers import interval
from reproduction.evidence import OURS, Evidence, final, in_every_setting, over_each_baseline
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
    gaps: dict[str, list[Values]] = {}  # by data
    beyond: dict[str, list[Values]] = {}
    published_gains: list[float] = []
    for setting in evidence.study.settings:
        data = evidence.data(setting)
        published = evidence.published_gain(setting) or 0.0
        gaps_of_setting = _gaps(evidence, setting)
        beyond_published = {seed: gap - published for seed, gap in gaps_of_setting.items()}
        gaps.setdefault(data, []).append(gaps_of_setting)
        beyond.setdefault(data, []).append(beyond_published)
        published_gains.append(published)
    verdict = above_zero([pool(beyond)])[0]
    if verdict is Verdict.FAILS and evidence.study.count("finished") < len(evidence.study.cells):
        verdict = Verdict.NOT_RUN
    paper = f"the paper's gain {100 * fmean(published_gains):.1f} points"
    return Finding(verdict, f"best minus worst {points(pool(gaps))}; {paper}")


def _gaps(evidence: Evidence, setting: str) -> Values:
    """Return seed -> accuracy of the variant that other seeds find best minus that of the worst."""
    accuracies: list[Values] = []
    seeds: set[int] = set()
    for variant in evidence.study.variants:
        values = final(evidence, (setting, variant))
        if len(values) > 1:
            accuracies.append(values)
            seeds |= values.keys()
    gaps: Values = {}
    for seed in sorted(seeds):
        with_seed = [values for values in accuracies if seed in values]
        best = max(with_seed, key=lambda values: _mean_without(values, seed))
        worst = min(with_seed, key=lambda values: _mean_without(values, seed))
        gaps[seed] = best[seed] - worst[seed]
    return gaps


def _mean_without(values: Values, left_out: int) -> float:
    return fmean(value for seed, value in values.items() if seed != left_out)


def adam_explains_the_figures(evidence: Evidence) -> Finding:
    """Whether Adam gives the paper's baselines, and glimpse still wins.

    Holds if every baseline is within one published standard deviation of its published figure and
    not significantly different from it (the report's own comparison) and glimpse, pooled over
    settings, is significantly above each baseline and above the control, does not hold if a
    baseline is significantly different or glimpse is significantly below one of them, otherwise
    inconclusive.
    """
    near: list[Verdict] = []
    for row in analyse(evidence.study).rows:
        if row.variant in evidence.baselines:
            near.append(_near(row, below_only=False))
    control = str(evidence.study.control)
    above = over_each_baseline(evidence, evidence.study.settings)
    above[control] = in_every_setting(evidence, OURS, control)
    verdict = all_of([*near, *above_zero(list(above.values()))])
    not_run = near.count(Verdict.NOT_RUN)
    figures = f"{near.count(Verdict.HOLDS)} of {len(near) - not_run} figures are near"
    measured = f"{figures}, {not_run} not run; glimpse over others, {smallest(above)}"
    return Finding(verdict, measured)


def agent_beats_chance(evidence: Evidence) -> Finding:
    """Whether the agent is above a random choice.

    Holds if glimpse, pooled over settings, is significantly above the control, does not hold if it
    is significantly below, otherwise inconclusive.
    """
    difference = in_every_setting(evidence, OURS, str(evidence.study.control))
    return Finding(above_zero([difference])[0], points(difference))


def presets_reach_the_paper(evidence: Evidence) -> Finding:
    """Whether either reading of the paper reaches its figure.

    Holds if in each setting one of the two presets of glimpse is no more than one published
    standard deviation below the published figure and not significantly below it (the report's own
    comparison), does not hold if both are significantly below in one setting, otherwise
    inconclusive.
    """
    results = analyse(evidence.study)
    verdicts: list[Verdict] = []
    measured: list[str] = []
    for setting in evidence.study.settings:
        presets: list[Verdict] = []
        for row in results.of(setting):
            if row.published is None or config_of(row.cells)["method"] != OURS:
                continue
            presets.append(_near(row, below_only=True))
            if row.paper is not None:
                gap = interval(row.paper.difference)
                measured.append(f"{row.variant} in {setting} {gap} points to the paper")
        verdicts.append(any_of(presets))
    return Finding(all_of(verdicts), "; ".join(measured) or "–")


def _near(row: ReportRow, below_only: bool) -> Verdict:
    """Judge whether a row is near its published figure.

    Args:
        row: with a published figure, if there is one.
        below_only: count a row above its figure as near.
    """
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
    differences: dict[str, Pooled | None] = {}
    for variant in REMOVED:
        differences[variant] = in_every_setting(evidence, OURS, variant)
    return Finding(all_of(above_zero(list(differences.values()))), smallest(differences))


def turns_make_up_for_the_harm(evidence: Evidence) -> Finding:
    """Whether the agent's choices do harm, and turns with a flat start fix it.

    Holds if glimpse, pooled over settings, is significantly below the control and each variant with
    turns significantly above glimpse, does not hold if glimpse is significantly above the control
    or such a variant significantly below glimpse, otherwise inconclusive.
    """
    control = str(evidence.study.control)
    harm = in_every_setting(evidence, control, OURS)
    gains: dict[str, Pooled | None] = {}
    for variant in evidence.study.variants:
        if "turns" in variant:
            gains[variant] = in_every_setting(evidence, variant, OURS)
    verdict = all_of(above_zero([harm, *gains.values()]))
    measured = f"{control} minus glimpse {points(harm)}; over glimpse, {smallest(gains)}"
    return Finding(verdict, measured)


def changes_raise_accuracy(evidence: Evidence) -> Finding:
    """Whether the agent gains by seeing changes of the global model.

    Holds if glimpse that sees changes, pooled over settings, is significantly above glimpse, does
    not hold if it is significantly below, otherwise inconclusive; what its attention does is in the
    section's text.
    """
    difference = in_every_setting(evidence, "glimpse, changes", OURS)
    return Finding(above_zero([difference])[0], points(difference))


def leaning_beats_chance(evidence: Evidence) -> Finding:
    """Whether an agent that leans towards a high loss is above a random choice.

    Holds if the leaning agent, pooled over settings, is significantly above the control, does not
    hold if it is significantly below, otherwise inconclusive.
    """
    difference = in_every_setting(evidence, "glimpse, leaning", str(evidence.study.control))
    return Finding(above_zero([difference])[0], points(difference))


def proof_mends_the_harm(evidence: Evidence) -> Finding:
    """Whether Q that has to prove itself costs nothing, and with a lean gains.

    Holds if, pooled over settings, the agent that asks for proof is significantly above glimpse and
    significantly less than half a point below the control, and with a lean significantly above the
    control, does not hold if one of these goes significantly the other way, otherwise inconclusive.
    """
    control = str(evidence.study.control)
    over_glimpse = in_every_setting(evidence, "glimpse, proven", OURS)
    over_control = in_every_setting(evidence, "glimpse, proven", control)
    leaning = in_every_setting(evidence, "glimpse, proven, leaning", control)
    no_harm = in_every_setting(evidence, "glimpse, proven", control, margin=-POINT / 2)
    measured = f"proven over glimpse {points(over_glimpse)}, over {control} {points(over_control)}"
    verdict = all_of(above_zero([over_glimpse, no_harm, leaning]))
    return Finding(verdict, f"{measured}; leaning over {control} {points(leaning)}")


def teaching_pays(evidence: Evidence) -> Finding:
    """Whether a policy that others taught is worth more than chance, and than one's own lessons.

    Holds if, pooled over settings, the taught agent is significantly above the control and
    significantly above the same agent that learns in its own run, does not hold if one of these
    goes significantly the other way, otherwise inconclusive.
    """
    control = str(evidence.study.control)
    over_control = in_every_setting(evidence, "glimpse, taught", control)
    over_untaught = in_every_setting(evidence, "glimpse, taught", "glimpse, untaught")
    over_loss = in_every_setting(evidence, "glimpse, taught", BY_LOSS)
    measured = (
        f"taught over {control} {points(over_control)}, over untaught {points(over_untaught)}; "
        f"over {BY_LOSS}, which learns nothing, {points(over_loss)}"
    )
    return Finding(all_of(above_zero([over_control, over_untaught])), measured)


def policy_travels(evidence: Evidence) -> Finding:
    """Whether a policy that one data set taught is worth more than chance on others.

    Holds if the taught agent, pooled over settings, is significantly above the control, does not
    hold if it is significantly below, otherwise inconclusive.
    """
    over_control = in_every_setting(evidence, "glimpse, taught", str(evidence.study.control))
    over_loss = in_every_setting(evidence, "glimpse, taught", BY_LOSS)
    measured = f"{points(over_control)}; over {BY_LOSS} {points(over_loss)}"
    return Finding(above_zero([over_control])[0], measured)


def choosing_is_worth_little(evidence: Evidence) -> Finding:
    """Whether a choice pays once everybody averages over time.

    Holds if for each variant the whole interval of its difference to the control, pooled over
    settings, lies below one point, does not hold if one is significantly above one point, otherwise
    inconclusive; fewer settings than planned: not run.
    """
    control = str(evidence.study.control)
    differences: dict[str, Pooled | None] = {}
    beyond: list[Pooled | None] = []
    for variant in evidence.study.variants:
        if variant != control:
            differences[variant] = in_every_setting(evidence, variant, control)
            beyond.append(in_every_setting(evidence, variant, control, margin=POINT))
    verdicts: list[Verdict] = []
    for difference, above_limit in zip(differences.values(), above_zero(beyond), strict=True):
        verdicts.append(_little(difference, above_limit))
    return Finding(all_of(verdicts), largest(differences))


def _little(difference: Pooled | None, above_limit: Verdict) -> Verdict:
    """Judge whether the whole interval of a difference lies below one point."""
    if difference is None:
        return Verdict.NOT_RUN
    if above_limit is Verdict.HOLDS:
        return Verdict.FAILS
    below = difference.high is not None and difference.high < POINT
    return Verdict.HOLDS if below else Verdict.INCONCLUSIVE
