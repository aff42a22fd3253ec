"""Verdicts on the paper's accuracy table and on what its text says of Figures 3 and 4."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from reproduction.evidence import (
    OURS,
    Evidence,
    above_level,
    contrast,
    deviation,
    gain,
    over_each_baseline,
    over_strongest,
    swing,
    under_each_baseline,
)
from reproduction.pooling import Pooled
from reproduction.verdict import (
    Finding,
    above_zero,
    all_of,
    at_least,
    counts,
    points,
    reaches,
    smallest,
)


def first_in_most(evidence: Evidence) -> Finding:
    """In how many settings glimpse comes first.

    Holds if glimpse is significantly above the strongest baseline (highest mean there) in at least
    the published number of settings, does not hold if it is significantly below in so many that the
    number is out of reach, otherwise inconclusive.
    """
    gaps = [over_strongest(evidence, [setting]) for setting in evidence.study.settings]
    verdicts = above_zero(gaps)
    return Finding(
        at_least(int(evidence.value or 0), verdicts), f"{_firsts(gaps)}, {counts(verdicts)}"
    )


def margin_where_first(evidence: Evidence) -> Finding:
    """By how much it is ahead where the paper has it ahead.

    Holds if, pooled over the settings in which the paper's own table has glimpse first, its gain
    over the strongest baseline is significant and its interval reaches the published size, does not
    hold if it is significantly smaller or below zero, otherwise inconclusive.
    """
    settings = [s for s in evidence.study.settings if (evidence.published_gain(s) or 0) > 0]
    found = over_strongest(evidence, settings)
    beyond = over_strongest(evidence, settings, evidence.share)
    return Finding(reaches(found, beyond), points(found))


def first_under_label_skew(evidence: Evidence) -> Finding:
    """Whether it comes first wherever clients hold two classes.

    Holds if glimpse is significantly above the strongest baseline in every label-skew setting and
    the interval of its pooled gain there reaches the published size, does not hold if it is
    significantly below in one of them or the pooled gain is significantly smaller, otherwise
    inconclusive.
    """
    settings = evidence.where(partition="label_skew")
    found = over_strongest(evidence, settings)
    beyond = over_strongest(evidence, settings, evidence.share)
    gaps = [over_strongest(evidence, [s]) for s in settings]
    each = above_zero(gaps)
    said = f"{points(found)}; {_firsts(gaps)}, {counts(each)}"
    return Finding(all_of([*each, reaches(found, beyond)]), said)


def _firsts(gaps: Sequence[Pooled | None]) -> str:
    """Write in how many settings the mean over seeds is the highest, real or not."""
    return f"highest mean in {sum(gap is not None and gap.mean > 0 for gap in gaps)}"


def close_elsewhere(evidence: Evidence) -> Finding:
    """How far behind it falls where the paper has it behind.

    Holds if, in every setting where the paper's own table does not have glimpse first, it is
    significantly less far below the strongest baseline than published, does not hold if it is
    significantly farther below in one of them, otherwise inconclusive.
    """
    settings = [s for s in evidence.study.settings if (evidence.published_gain(s) or 0) <= 0]
    gaps = {s: over_strongest(evidence, [s]) for s in settings}
    verdicts = above_zero([over_strongest(evidence, [s], -evidence.share) for s in settings])
    return Finding(all_of(verdicts), smallest(gaps))


def steadier_over_seeds(evidence: Evidence) -> Finding:
    """Whether another seed changes its accuracy less.

    Holds if the distance of a seed's accuracy from the mean over seeds, pooled over all settings,
    is significantly smaller for glimpse than for each of the four baselines, does not hold if it is
    significantly larger than for one of them, otherwise inconclusive.
    """
    found = under_each_baseline(evidence, evidence.study.settings, deviation)
    return Finding(all_of(above_zero(list(found.values()))), smallest(found, "points less"))


def alike_in_both_visibilities(evidence: Evidence) -> Finding:
    """Whether it matters how clients become visible.

    Holds if for each of the paper's methods the accuracies with a mobile server and with random
    availability, data and partition the same, differ by significantly less than the largest such
    gap in the paper's own table, does not hold if one differs by significantly more, otherwise
    inconclusive.
    """
    pairs = _both_visibilities(evidence)
    figures = [(evidence.published(a), evidence.published(b)) for a, b in pairs]
    methods = [*evidence.baselines, OURS]
    margin = max(abs(a[m][0] - b[m][0]) for a, b in figures for m in methods) / 100
    arms = [((a, m), (b, m)) for (a, b), m in product(pairs, methods)]
    above = [contrast(evidence, [(a, b)], margin=-margin) for a, b in arms]
    below = [contrast(evidence, [(b, a)], margin=-margin) for a, b in arms]
    found = {f"{a[1]} in {a[0]}": contrast(evidence, [(a, b)]) for a, b in arms}
    known = {name: 100 * abs(d.mean) for name, d in found.items() if d is not None}
    widest = max(known, key=known.__getitem__, default=None)
    said = f"largest gap {known[widest]:.1f} points ({widest})" if widest else "–"
    return Finding(
        all_of(above_zero([*above, *below])), f"{said}; largest in the paper {100 * margin:.1f}"
    )


def _both_visibilities(evidence: Evidence) -> list[tuple[str, str]]:
    """Return (mobile server, random availability) of the same data and partition."""
    found = []
    for setting in evidence.images():
        config = evidence.config(setting)
        if config["visibility.kind"] == "mobile":
            others = evidence.where(
                data=config["data.name"], partition=config["data.partition"], visibility="random"
            )
            found += [(setting, other) for other in others]
    return found


def larger_gain_when_mobile(evidence: Evidence) -> Finding:
    """Whether the gain is larger with a mobile server.

    Holds if the gain over the strongest baseline is significantly larger with a mobile server than
    with random availability, pooled over data and partitions, does not hold if it is significantly
    smaller, otherwise inconclusive.
    """
    pairs = [((a, OURS), (b, OURS)) for a, b in _both_visibilities(evidence)]
    found = contrast(evidence, pairs, gain)
    return Finding(above_zero([found])[0], points(found))


def higher_and_steadier_under_label_skew(evidence: Evidence) -> Finding:
    """Whether it ends higher and swings less where clients hold two classes.

    Holds if under label skew, pooled over settings, glimpse is significantly above each baseline
    and its standard deviation over the last 50 rounds is significantly below that of each, does not
    hold if one of these differences goes significantly the other way, otherwise inconclusive.
    """
    settings = evidence.where(partition="label_skew")
    higher = over_each_baseline(evidence, settings)
    return _higher_and_steadier(evidence, settings, list(higher.values()), smallest(higher))


def competitive_and_steadier_under_dirichlet(evidence: Evidence) -> Finding:
    """Whether it keeps up and swings less where clients are less different.

    Holds if under the Dirichlet distribution, pooled over settings, glimpse is significantly less
    far below each baseline than what the paper calls competitive and its standard deviation over
    the last 50 rounds is significantly below that of each, does not hold if one of these
    differences goes significantly the other way, otherwise inconclusive.
    """
    settings = evidence.where(partition="dirichlet")
    margin = evidence.claimed("close-elsewhere")
    near = over_each_baseline(evidence, settings, margin=-margin)
    said = smallest(over_each_baseline(evidence, settings))
    return _higher_and_steadier(evidence, settings, list(near.values()), said)


def _higher_and_steadier(
    evidence: Evidence, settings: list[str], higher: list[Pooled | None], said: str
) -> Finding:
    calmer = under_each_baseline(evidence, settings, swing)
    verdict = all_of(above_zero([*higher, *calmer.values()]))
    return Finding(verdict, f"accuracy, {said}; swing, {smallest(calmer, 'points less')}")


def all_above_level_on_activities(evidence: Evidence) -> Finding:
    """Whether every method does well on the activity data.

    Holds if every one of the paper's five methods is significantly above the published level in
    both settings of the activity data, does not hold if one is significantly below, otherwise
    inconclusive.
    """
    settings = evidence.where(partition="subject")
    arms = product(settings, [*evidence.baselines, OURS])
    found = {f"{m} in {s}": above_level(evidence, (s, m), evidence.share) for s, m in arms}
    verdicts = above_zero(list(found.values()))
    return Finding(all_of(verdicts), f"above {evidence.value} %, {smallest(found)}")


def steadier_on_activities(evidence: Evidence) -> Finding:
    """Whether it swings less on the activity data.

    Holds if on the activity data, pooled over both settings, the standard deviation of glimpse over
    the last 50 rounds is significantly below that of each baseline, does not hold if it is
    significantly above that of one, otherwise inconclusive.
    """
    found = under_each_baseline(evidence, evidence.where(partition="subject"), swing)
    return Finding(all_of(above_zero(list(found.values()))), smallest(found, "points less"))


def larger_gain_where_baselines_are_low(evidence: Evidence) -> Finding:
    """Whether it helps most where others are low.

    Holds if the gain over the strongest baseline is significantly larger under label skew, where
    the paper's own baselines are lower, than under the Dirichlet distribution, pooled over data and
    visibility, does not hold if it is significantly smaller, otherwise inconclusive.
    """
    pairs = []
    for skewed in evidence.where(partition="label_skew"):
        config = evidence.config(skewed)
        data, visibility = config["data.name"], config["visibility.kind"]
        mild = evidence.where(data=data, visibility=visibility, partition="dirichlet")
        pairs += [((skewed, OURS), (other, OURS)) for other in mild]
    found = contrast(evidence, pairs, gain)
    return Finding(above_zero([found])[0], points(found))
