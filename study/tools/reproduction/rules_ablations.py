"""Verdicts on the paper's Figures 6 to 8: context length, visibility and K, identities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from reproduction.evidence import OURS, Arm, Evidence, contrast, swing, whole
from reproduction.verdict import Finding, Verdict, above_zero, all_of, points, smallest

NOTICEABLE = 0.01  # a gain below one point is called "not noticeable"; the paper gives no number
WITH_IDENTITY, WITHOUT_IDENTITY = "identity table", "without identity"
Pairs = list[tuple[Arm, Arm]]


def _lengths(evidence: Evidence) -> dict[int, str]:
    """Return H -> the variant that changes H and nothing else."""
    found = {}
    for cell in evidence.study.cells:
        history = int(cell.config["agent.history"])
        if cell.variant == f"H={history}":
            found[history] = cell.variant
    return dict(sorted(found.items()))


def _everywhere(evidence: Evidence, first: str, second: str) -> Pairs:
    return [((s, first), (s, second)) for s in evidence.study.settings]


def shortest_context_is_worst(evidence: Evidence) -> Finding:
    """Whether the agent without a past is the worst.

    Holds if every longer H is significantly above H = 1, pooled over settings, does not hold if one
    is significantly below it, otherwise inconclusive.
    """
    shortest, *longer = _lengths(evidence).values()
    found = {h: contrast(evidence, _everywhere(evidence, h, shortest)) for h in longer}
    return Finding(all_of(above_zero(list(found.values()))), smallest(found))


def longer_context_helps(evidence: Evidence) -> Finding:
    """Whether accuracy rises with H.

    Holds if the longest H that the paper finds useful is significantly above H = 1 and no step
    between neighbouring H up to there is a significant loss, pooled over settings, does not hold if
    it is significantly below or a step is a significant loss, otherwise inconclusive.
    """
    limit = int(evidence.value or 0)
    useful = [name for h, name in _lengths(evidence).items() if h <= limit]
    whole_way = contrast(evidence, _everywhere(evidence, useful[-1], useful[0]))
    steps = [contrast(evidence, _everywhere(evidence, b, a)) for a, b in pairwise(useful)]
    end, *rest = above_zero([whole_way, *steps])
    lost = [v for v in rest if v in (Verdict.FAILS, Verdict.NOT_RUN)]
    return Finding(all_of([end, *lost]), f"{useful[0]} to {useful[-1]}: {points(whole_way)}")


def context_saturates(evidence: Evidence) -> Finding:
    """Whether a still longer past brings nothing.

    Holds if the gain from the longest H that the paper finds useful to the longest H that was run,
    pooled over settings, is significantly below one point, does not hold if it is significantly
    above one point, otherwise inconclusive.
    """
    limit = int(evidence.value or 0)
    lengths = _lengths(evidence)
    useful, longest = max(h for h in lengths if h <= limit), max(lengths)
    there = _everywhere(evidence, lengths[longest], lengths[useful])
    back = [(b, a) for a, b in there]
    found = contrast(evidence, there)
    verdict = above_zero([contrast(evidence, back, margin=-NOTICEABLE)])[0]
    return Finding(verdict, f"{lengths[useful]} to {lengths[longest]}: {points(found)}")


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
        pairs += [((b, OURS), (a, OURS)) for a, b in pairwise(ordered)]
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
    said = f"larger clusters {points(mobile)}; larger p {points(random)}"
    return Finding(all_of(above_zero([mobile, random])), said)


def larger_share_helps(evidence: Evidence) -> Finding:
    """Whether choosing more of the visible clients gives a higher accuracy.

    Holds if glimpse is significantly more accurate with the next larger K, clusters the same,
    pooled over settings, does not hold if it is significantly less accurate, otherwise
    inconclusive.
    """
    found = contrast(evidence, _larger_k(evidence))
    return Finding(above_zero([found])[0], points(found))


def gains_look_alike(evidence: Evidence) -> Finding:
    """Whether these gains are the same everywhere.

    Holds if larger clusters, larger p and larger K each are a significant gain for glimpse under
    each partition, does not hold if one of these six effects is a significant loss, otherwise
    inconclusive.
    """
    found = {}
    for partition in dict.fromkeys(
        evidence.config(s)["data.partition"] for s in evidence.study.settings
    ):
        found[f"clusters, {partition}"] = contrast(evidence, _larger_clusters(evidence, partition))
        found[f"p, {partition}"] = contrast(evidence, _larger_p(evidence, partition))
        found[f"K, {partition}"] = contrast(evidence, _larger_k(evidence, partition))
    return Finding(all_of(above_zero(list(found.values()))), smallest(found))


def consistent_over_visibility(evidence: Evidence) -> Finding:
    """Whether glimpse does well whatever is visible and chosen.

    Holds if glimpse is significantly above the control, random choice with the same averaging,
    pooled over all settings, and significantly below it in none, does not hold if it is
    significantly below in one setting or pooled, otherwise inconclusive.
    """
    control = str(evidence.study.control)
    pairs = _everywhere(evidence, OURS, control)
    pooled = contrast(evidence, pairs)
    whole_gain, *each = above_zero([pooled, *(contrast(evidence, [pair]) for pair in pairs)])
    lost = [v for v in each if v in (Verdict.FAILS, Verdict.NOT_RUN)]
    below = each.count(Verdict.FAILS)
    said = f"{points(pooled)} over {control}; significantly below in {below} settings"
    return Finding(all_of([whole_gain, *lost]), said)


def identity_helps_throughout(evidence: Evidence) -> Finding:
    """Whether accuracy is lower without identities.

    Holds if with the identity table both the mean accuracy over the whole training and the final
    accuracy, pooled over settings, are significantly higher and the final accuracy is significantly
    lower in no setting, does not hold if one of these goes significantly the other way, otherwise
    inconclusive.
    """
    pairs = _everywhere(evidence, WITH_IDENTITY, WITHOUT_IDENTITY)
    end, curve = contrast(evidence, pairs), contrast(evidence, pairs, whole)
    each = [contrast(evidence, [pair]) for pair in pairs]
    higher, throughout, *one_by_one = above_zero([end, curve, *each])
    lost = [v for v in one_by_one if v in (Verdict.FAILS, Verdict.NOT_RUN)]
    said = f"final {points(end)}; whole training {points(curve)}"
    return Finding(all_of([higher, throughout, *lost]), said)


def identity_steadies_under_dirichlet(evidence: Evidence) -> Finding:
    """Whether accuracy swings more without identities.

    Holds if under the Dirichlet distribution, pooled over settings, the standard deviation over the
    last 50 rounds is significantly larger without identities, does not hold if it is significantly
    smaller, otherwise inconclusive; over rounds, because two or three seeds say nothing of a spread
    over seeds.
    """
    settings = evidence.where(partition="dirichlet")
    pairs: Pairs = [((s, WITHOUT_IDENTITY), (s, WITH_IDENTITY)) for s in settings]
    found = contrast(evidence, pairs, swing)
    return Finding(above_zero([found])[0], points(found, "points more"))
