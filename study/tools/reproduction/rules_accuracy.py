"""Verdicts on the paper's accuracy table and on what its text says of Figures 3 and 4."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from reproduction.evidence import (
    OURS,
    Arm,
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
    verdict = at_least(int(evidence.value or 0), verdicts)
    return Finding(verdict, f"{_firsts(gaps)}, {counts(verdicts)}")


def margin_where_first(evidence: Evidence) -> Finding:
    """By how much it is ahead where the paper has it ahead.

    Holds if, pooled over the settings in which the paper's own table has glimpse first, its gain
    over the strongest baseline is significant and its interval reaches the published size, does not
    hold if it is significantly smaller or below zero, otherwise inconclusive.
    """
    settings: list[str] = []
    for setting in evidence.study.settings:
        if (evidence.published_gain(setting) or 0) > 0:
            settings.append(setting)
    gain_there = over_strongest(evidence, settings)
    beyond = over_strongest(evidence, settings, evidence.share)
    return Finding(reaches(gain_there, beyond), points(gain_there))


def first_under_label_skew(evidence: Evidence) -> Finding:
    """Whether it comes first wherever clients hold two classes.

    Holds if glimpse is significantly above the strongest baseline in every label-skew setting and
    the interval of its pooled gain there reaches the published size, does not hold if it is
    significantly below in one of them or the pooled gain is significantly smaller, otherwise
    inconclusive.
    """
    settings = evidence.where(partition="label_skew")
    pooled = over_strongest(evidence, settings)
    beyond = over_strongest(evidence, settings, evidence.share)
    gaps = [over_strongest(evidence, [setting]) for setting in settings]
    verdicts = above_zero(gaps)
    measured = f"{points(pooled)}; {_firsts(gaps)}, {counts(verdicts)}"
    return Finding(all_of([*verdicts, reaches(pooled, beyond)]), measured)


def _firsts(gaps: Sequence[Pooled | None]) -> str:
    """Write in how many settings the mean over seeds is the highest, significantly or not."""
    firsts = sum(gap is not None and gap.mean > 0 for gap in gaps)
    return f"highest mean in {firsts}"


def close_elsewhere(evidence: Evidence) -> Finding:
    """How far behind it falls where the paper has it behind.

    Holds if, in every setting where the paper's own table does not have glimpse first, it is
    significantly less far below the strongest baseline than published, does not hold if it is
    significantly farther below in one of them, otherwise inconclusive.
    """
    gaps: dict[str, Pooled | None] = {}
    above_published: list[Pooled | None] = []
    for setting in evidence.study.settings:
        if (evidence.published_gain(setting) or 0) <= 0:
            gaps[setting] = over_strongest(evidence, [setting])
            above_published.append(over_strongest(evidence, [setting], -evidence.share))
    return Finding(all_of(above_zero(above_published)), smallest(gaps))


def steadier_over_seeds(evidence: Evidence) -> Finding:
    """Whether another seed changes its accuracy less.

    Holds if the distance of a seed's accuracy from the mean over seeds, pooled over all settings,
    is significantly smaller for glimpse than for each of the four baselines, does not hold if it is
    significantly larger than for one of them, otherwise inconclusive.
    """
    differences = under_each_baseline(evidence, evidence.study.settings, deviation)
    verdicts = above_zero(list(differences.values()))
    return Finding(all_of(verdicts), smallest(differences, "points less"))


def alike_in_both_visibilities(evidence: Evidence) -> Finding:
    """Whether it matters how clients become visible.

    Holds if for each of the paper's methods the accuracies with a mobile server and with random
    availability, data and partition the same, differ by significantly less than the largest such
    gap in the paper's own table, does not hold if one differs by significantly more, otherwise
    inconclusive.
    """
    pairs = list(product(_both_visibilities(evidence), [*evidence.baselines, OURS]))
    published_gaps: list[float] = []
    for (mobile, random), method in pairs:
        figures = evidence.published(mobile)[method], evidence.published(random)[method]
        published_gaps.append(abs(figures[0][0] - figures[1][0]))
    margin = max(published_gaps) / 100
    within_margin: list[Pooled | None] = []
    gaps: dict[str, float] = {}  # in points
    for (mobile, random), method in pairs:
        arms = (mobile, method), (random, method)
        difference = contrast(evidence, [arms])
        within_margin.append(contrast(evidence, [arms], margin=-margin))
        within_margin.append(contrast(evidence, [arms[::-1]], margin=-margin))
        if difference is not None:
            gaps[f"{method} in {mobile}"] = 100 * abs(difference.mean)
    widest = max(gaps, key=gaps.__getitem__, default=None)
    measured = "–" if widest is None else f"largest gap {gaps[widest]:.1f} points ({widest})"
    verdict = all_of(above_zero(within_margin))
    return Finding(verdict, f"{measured}; largest in the paper {100 * margin:.1f}")


def _both_visibilities(evidence: Evidence) -> list[tuple[str, str]]:
    """Return (mobile server, random availability) of the same data and partition."""
    pairs: list[tuple[str, str]] = []
    for setting in evidence.images():
        config = evidence.config(setting)
        if config["visibility.kind"] == "mobile":
            with_random = evidence.where(
                data=config["data.name"], partition=config["data.partition"], visibility="random"
            )
            for other_setting in with_random:
                pairs.append((setting, other_setting))
    return pairs


def larger_gain_when_mobile(evidence: Evidence) -> Finding:
    """Whether the gain is larger with a mobile server.

    Holds if the gain over the strongest baseline is significantly larger with a mobile server than
    with random availability, pooled over data and partitions, does not hold if it is significantly
    smaller, otherwise inconclusive.
    """
    pairs: list[tuple[Arm, Arm]] = []
    for mobile, random in _both_visibilities(evidence):
        pairs.append(((mobile, OURS), (random, OURS)))
    difference = contrast(evidence, pairs, gain)
    return Finding(above_zero([difference])[0], points(difference))


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
    measured = smallest(over_each_baseline(evidence, settings))
    return _higher_and_steadier(evidence, settings, list(near.values()), measured)


def _higher_and_steadier(
    evidence: Evidence, settings: list[str], higher: list[Pooled | None], accuracy: str
) -> Finding:
    steadier = under_each_baseline(evidence, settings, swing)
    verdict = all_of(above_zero([*higher, *steadier.values()]))
    return Finding(verdict, f"accuracy, {accuracy}; swing, {smallest(steadier, 'points less')}")


def all_above_level_on_activities(evidence: Evidence) -> Finding:
    """Whether every method does well on the activity data.

    Holds if every one of the paper's five methods is significantly above the published level in
    both settings of the activity data, does not hold if one is significantly below, otherwise
    inconclusive.
    """
    differences: dict[str, Pooled | None] = {}
    for setting in evidence.where(partition="subject"):
        for method in (*evidence.baselines, OURS):
            difference = above_level(evidence, (setting, method), evidence.share)
            differences[f"{method} in {setting}"] = difference
    verdicts = above_zero(list(differences.values()))
    return Finding(all_of(verdicts), f"above {evidence.value} %, {smallest(differences)}")


def steadier_on_activities(evidence: Evidence) -> Finding:
    """Whether it swings less on the activity data.

    Holds if on the activity data, pooled over both settings, the standard deviation of glimpse over
    the last 50 rounds is significantly below that of each baseline, does not hold if it is
    significantly above that of one, otherwise inconclusive.
    """
    differences = under_each_baseline(evidence, evidence.where(partition="subject"), swing)
    verdicts = above_zero(list(differences.values()))
    return Finding(all_of(verdicts), smallest(differences, "points less"))


def larger_gain_where_baselines_are_low(evidence: Evidence) -> Finding:
    """Whether it helps most where others are low.

    Holds if the gain over the strongest baseline is significantly larger under label skew, where
    the paper's own baselines are lower, than under the Dirichlet distribution, pooled over data and
    visibility, does not hold if it is significantly smaller, otherwise inconclusive.
    """
    pairs: list[tuple[Arm, Arm]] = []
    for skewed in evidence.where(partition="label_skew"):
        config = evidence.config(skewed)
        matching = evidence.where(
            data=config["data.name"], visibility=config["visibility.kind"], partition="dirichlet"
        )
        for dirichlet in matching:
            pairs.append(((skewed, OURS), (dirichlet, OURS)))
    difference = contrast(evidence, pairs, gain)
    return Finding(above_zero([difference])[0], points(difference))
