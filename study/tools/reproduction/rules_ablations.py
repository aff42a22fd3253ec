"""Verdicts on the paper's Figures 6 to 8: context length, visibility and K, identities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from reproduction.evidence import (
    OURS,
    Arm,
    Evidence,
    contrast,
    in_every_setting,
    swing,
    whole,
)
from reproduction.pooling import Pooled
from reproduction.verdict import Finding, Verdict, above_zero, all_of, points, smallest

NOTICEABLE = 0.01  # a gain below one point is called "not noticeable"; the paper gives no number
WITH_IDENTITY = "identity table"
WITHOUT_IDENTITY = "without identity"
Pairs = list[tuple[Arm, Arm]]


def _lengths(evidence: Evidence) -> dict[int, str]:
    """Return H -> the variant that changes H and nothing else."""
    variants: dict[int, str] = {}
    for cell in evidence.study.cells:
        history = int(cell.config["agent.history"])
        if cell.variant == f"H={history}":
            variants[history] = cell.variant
    return dict(sorted(variants.items()))


def _by_setting(evidence: Evidence, variant: str, other: str) -> list[Pooled | None]:
    """Return the difference of two variants in each setting alone."""
    differences: list[Pooled | None] = []
    for setting in evidence.study.settings:
        differences.append(in_every_setting(evidence, variant, other, settings=[setting]))
    return differences


def _losses(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts that speak against "no difference is a loss"; open ones do not."""
    return [v for v in verdicts if v in (Verdict.FAILS, Verdict.NOT_RUN)]


def shortest_context_is_worst(evidence: Evidence) -> Finding:
    """Whether the agent without a past is the worst.

    Holds if every longer H is significantly above H = 1, pooled over settings, does not hold if one
    is significantly below it, otherwise inconclusive.
    """
    shortest, *longer = _lengths(evidence).values()
    differences: dict[str, Pooled | None] = {}
    for variant in longer:
        differences[variant] = in_every_setting(evidence, variant, shortest)
    return Finding(all_of(above_zero(list(differences.values()))), smallest(differences))


def longer_context_helps(evidence: Evidence) -> Finding:
    """Whether accuracy rises with H.

    Holds if the longest H that the paper finds useful is significantly above H = 1 and no step
    between neighbouring H up to there is a significant loss, pooled over settings, does not hold if
    it is significantly below or a step is a significant loss, otherwise inconclusive.
    """
    limit = int(evidence.value or 0)
    useful = [name for h, name in _lengths(evidence).items() if h <= limit]
    total = in_every_setting(evidence, useful[-1], useful[0])
    steps = [in_every_setting(evidence, longer, shorter) for shorter, longer in pairwise(useful)]
    verdict, *step_verdicts = above_zero([total, *steps])
    measured = f"{useful[0]} to {useful[-1]}: {points(total)}"
    return Finding(all_of([verdict, *_losses(step_verdicts)]), measured)


def context_saturates(evidence: Evidence) -> Finding:
    """Whether a still longer past brings nothing.

    Holds if the gain from the longest H that the paper finds useful to the longest H that was run,
    pooled over settings, is significantly below one point, does not hold if it is significantly
    above one point, otherwise inconclusive.
    """
    limit = int(evidence.value or 0)
    lengths = _lengths(evidence)
    useful = max(h for h in lengths if h <= limit)
    longest = max(lengths)
    gain = in_every_setting(evidence, lengths[longest], lengths[useful])
    shortfall = in_every_setting(evidence, lengths[useful], lengths[longest], margin=-NOTICEABLE)
    verdict = above_zero([shortfall])[0]
    return Finding(verdict, f"{lengths[useful]} to {lengths[longest]}: {points(gain)}")


Config = Mapping[str, Any]


def _neighbours(
    evidence: Evidence,
    kind: str,
    same: Callable[[Config], Any],
    size: Callable[[Config], float],
    partition: str | None = None,
) -> Pairs:
    """Return glimpse with the next larger and the smaller size, all else in `same` alike."""
    groups: dict[Any, list[str]] = {}
    for setting in evidence.where(visibility=kind):
        config = evidence.config(setting)
        if partition in (None, config["data.partition"]):
            groups.setdefault((config["data.partition"], same(config)), []).append(setting)
    pairs: Pairs = []
    for group in groups.values():
        ordered = sorted(group, key=lambda s: size(evidence.config(s)))
        for smaller, larger in pairwise(ordered):
            pairs.append(((larger, OURS), (smaller, OURS)))
    return pairs


def _larger_clusters(evidence: Evidence, partition: str | None = None) -> Pairs:
    def same_share(config: Config) -> float:
        return float(config["selection.k"] / config["visibility.cluster_size"])

    def visible(config: Config) -> float:
        return float(config["visibility.cluster_size"])

    return _neighbours(evidence, "mobile", same_share, visible, partition)


def _larger_p(evidence: Evidence, partition: str | None = None) -> Pairs:
    return _neighbours(
        evidence, "random", lambda c: c["selection.k"], lambda c: c["visibility.p"], partition
    )


def _larger_k(evidence: Evidence, partition: str | None = None) -> Pairs:
    return _neighbours(
        evidence,
        "mobile",
        lambda c: c["visibility.cluster_size"],
        lambda c: c["selection.k"],
        partition,
    )


def more_visible_clients_help(evidence: Evidence) -> Finding:
    """Whether seeing more clients gives a higher accuracy.

    Holds if glimpse is significantly more accurate with the larger clusters (the same share chosen)
    and with the larger p (the same K), each pooled over its settings, does not hold if one of the
    two is a significant loss, otherwise inconclusive.
    """
    mobile = contrast(evidence, _larger_clusters(evidence))
    random = contrast(evidence, _larger_p(evidence))
    measured = f"larger clusters {points(mobile)}; larger p {points(random)}"
    return Finding(all_of(above_zero([mobile, random])), measured)


def larger_share_helps(evidence: Evidence) -> Finding:
    """Whether choosing more of the visible clients gives a higher accuracy.

    Holds if glimpse is significantly more accurate with the next larger K, clusters the same,
    pooled over settings, does not hold if it is significantly less accurate, otherwise
    inconclusive.
    """
    difference = contrast(evidence, _larger_k(evidence))
    return Finding(above_zero([difference])[0], points(difference))


def gains_look_alike(evidence: Evidence) -> Finding:
    """Whether these gains are the same everywhere.

    Holds if larger clusters, larger p and larger K each are a significant gain for glimpse under
    each partition, does not hold if one of these six effects is a significant loss, otherwise
    inconclusive.
    """
    partitions: dict[str, None] = {}
    for setting in evidence.study.settings:
        partitions[evidence.config(setting)["data.partition"]] = None
    gains: dict[str, Pooled | None] = {}
    for partition in partitions:
        gains[f"clusters, {partition}"] = contrast(evidence, _larger_clusters(evidence, partition))
        gains[f"p, {partition}"] = contrast(evidence, _larger_p(evidence, partition))
        gains[f"K, {partition}"] = contrast(evidence, _larger_k(evidence, partition))
    return Finding(all_of(above_zero(list(gains.values()))), smallest(gains))


def consistent_over_visibility(evidence: Evidence) -> Finding:
    """Whether glimpse does well whatever is visible and chosen.

    Holds if glimpse is significantly above the control, random choice with the same averaging,
    pooled over all settings, and significantly below it in none, does not hold if it is
    significantly below in one setting or pooled, otherwise inconclusive.
    """
    control = str(evidence.study.control)
    pooled = in_every_setting(evidence, OURS, control)
    verdict, *by_setting = above_zero([pooled, *_by_setting(evidence, OURS, control)])
    below = by_setting.count(Verdict.FAILS)
    measured = f"{points(pooled)} over {control}; significantly below in {below} settings"
    return Finding(all_of([verdict, *_losses(by_setting)]), measured)


def identity_helps_throughout(evidence: Evidence) -> Finding:
    """Whether accuracy is lower without identities.

    Holds if with the identity table both the mean accuracy over the whole training and the final
    accuracy, pooled over settings, are significantly higher and the final accuracy is significantly
    lower in no setting, does not hold if one of these goes significantly the other way, otherwise
    inconclusive.
    """
    at_end = in_every_setting(evidence, WITH_IDENTITY, WITHOUT_IDENTITY)
    throughout = in_every_setting(evidence, WITH_IDENTITY, WITHOUT_IDENTITY, whole)
    gaps = _by_setting(evidence, WITH_IDENTITY, WITHOUT_IDENTITY)
    end_verdict, whole_verdict, *by_setting = above_zero([at_end, throughout, *gaps])
    measured = f"final {points(at_end)}; whole training {points(throughout)}"
    return Finding(all_of([end_verdict, whole_verdict, *_losses(by_setting)]), measured)


def identity_steadies_under_dirichlet(evidence: Evidence) -> Finding:
    """Whether accuracy swings more without identities.

    Holds if under the Dirichlet distribution, pooled over settings, the standard deviation over the
    last 50 rounds is significantly larger without identities, does not hold if it is significantly
    smaller, otherwise inconclusive; over rounds, because two or three seeds say nothing of a spread
    over seeds.
    """
    settings = evidence.where(partition="dirichlet")
    difference = in_every_setting(
        evidence, WITHOUT_IDENTITY, WITH_IDENTITY, swing, settings=settings
    )
    return Finding(above_zero([difference])[0], points(difference, "points more"))
