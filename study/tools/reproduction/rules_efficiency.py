"""Verdicts on what a target accuracy costs: the paper's Figure 5, and how fast curves rise.

A saving is the report's: one minus our cost over theirs, run by run. So it is no symmetric measure:
twice as dear is -100 %, half as dear +50 %. A run that missed the target only bounds its cost, so a
saving may be known as "at least" or "at most"; a verdict that such a bound cannot carry is
"inconclusive".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fedglimpse.studies.report.analysis import spent
from fedglimpse.studies.statistics.to_target import Saving, Spent, saving
from reproduction.evidence import OURS, Evidence, over_strongest
from reproduction.pooling import Pooled, Values, pool
from reproduction.verdict import Finding, Verdict, above_zero, all_of, counts, points, reaches

SERVER_BASELINES = ("fedawac", "ha-edgeflow")  # the paper compares server FLOPs with these alone


@dataclass(frozen=True)
class Average:
    """Savings averaged over baselines, one value for each seed of each setting."""

    share: Pooled  # above zero
    beyond: Pooled  # above the published share
    bounds: frozenset[str]

    @property
    def text(self) -> str:
        """The average, said as the bound it is."""
        known = {frozenset("="): "", frozenset("=≥"): "at least ", frozenset("≥"): "at least "}
        known |= {frozenset("=≤"): "at most ", frozenset("≤"): "at most "}
        return known.get(self.bounds, "as far as known, ") + points(self.share, "%")

    def carries(self, verdict: Verdict) -> Verdict:
        """Return a verdict, unless bounds leave it open."""
        open_ends = {Verdict.HOLDS: "≤?", Verdict.FAILS: "≥?"}.get(verdict, "")
        return Verdict.INCONCLUSIVE if self.bounds & set(open_ends) else verdict


def _runs(evidence: Evidence, setting: str, variant: str, measure: str) -> dict[int, Spent]:
    """Return what each run spent that is over, finished or failed."""
    cells = [c for c in evidence.study.of(setting, variant) if c.state in ("finished", "failed")]
    return spent(cells, measure, evidence.study.targets[setting])


def _savings(
    evidence: Evidence, setting: str, measure: str, baselines: Sequence[str]
) -> dict[int, list[Saving]]:
    """Return seed -> savings over all baselines, of the seeds that every one of them has."""
    ours = _runs(evidence, setting, OURS, measure)
    theirs = [_runs(evidence, setting, baseline, measure) for baseline in baselines]
    found = {}
    for seed, run in ours.items():
        each = [saving([run], [other[seed]]) for other in theirs if seed in other]
        known = [one for one in each if one is not None]
        if len(known) == len(baselines):
            found[seed] = known
    return found


def average_saving(
    evidence: Evidence,
    settings: Sequence[str],
    measure: str,
    baselines: Sequence[str],
    published: float = 0.0,
) -> Average | None:
    """Return savings until the targets, pooled over settings; None where one is not run."""
    bounds: set[str] = set()
    ours, theirs = dict[str, list[Values]](), dict[str, list[Values]]()
    for setting in settings:
        found = _savings(evidence, setting, measure, baselines)
        shares = {seed: fmean(one.share for one in each) for seed, each in found.items()}
        bounds |= {one.bound for each in found.values() for one in each}
        data = evidence.data(setting)
        ours.setdefault(data, []).append(shares)
        theirs.setdefault(data, []).append({s: share - published for s, share in shares.items()})
    share, beyond = pool(ours), pool(theirs)
    if share is None or beyond is None:
        return None
    return Average(share, beyond, frozenset(bounds))


def _saves(evidence: Evidence, partition: str, measure: str, baselines: Sequence[str]) -> Finding:
    settings = evidence.where(partition=partition)
    found = average_saving(evidence, settings, measure, baselines, evidence.share)
    if found is None:
        return Finding(Verdict.NOT_RUN, "–")
    return Finding(found.carries(reaches(found.share, found.beyond)), found.text)


def saves_uplink_under_dirichlet(evidence: Evidence) -> Finding:
    """How much less is sent until the target, Dirichlet.

    Holds if the uplink saved until the setting's fixed target, averaged over the four baselines and
    pooled over the Dirichlet settings, is significantly above zero and its interval reaches the
    published share, does not hold if it is significantly smaller, otherwise inconclusive.
    """
    return _saves(evidence, "dirichlet", "uplink_bytes", evidence.baselines)


def saves_uplink_under_label_skew(evidence: Evidence) -> Finding:
    """How much less is sent until the target, label skew.

    Holds if the uplink saved until the setting's fixed target, averaged over the four baselines and
    pooled over the label-skew settings, is significantly above zero and its interval reaches the
    published share, does not hold if it is significantly smaller, otherwise inconclusive.
    """
    return _saves(evidence, "label_skew", "uplink_bytes", evidence.baselines)


def saves_server_flops_under_dirichlet(evidence: Evidence) -> Finding:
    """How much less the server computes until the target, Dirichlet.

    Holds if the server FLOPs saved until the setting's fixed target, averaged over FedAWAC and
    HA-EdgeFLow and pooled over the Dirichlet settings, are significantly above zero and their
    interval reaches the published share, does not hold if they are significantly fewer, otherwise
    inconclusive.
    """
    return _saves(evidence, "dirichlet", "server_flops", SERVER_BASELINES)


def saves_server_flops_under_label_skew(evidence: Evidence) -> Finding:
    """How much less the server computes until the target, label skew.

    Holds if the server FLOPs saved until the setting's fixed target, averaged over FedAWAC and
    HA-EdgeFLow and pooled over the label-skew settings, are significantly above zero and their
    interval reaches the published share, does not hold if they are significantly fewer, otherwise
    inconclusive.
    """
    return _saves(evidence, "label_skew", "server_flops", SERVER_BASELINES)


def faster_and_higher_under_label_skew(evidence: Evidence) -> Finding:
    """Whether it rises faster and ends higher where clients hold two classes.

    Holds if under label skew the rounds saved until the setting's fixed target, averaged over the
    four baselines and pooled over settings, are significantly above zero and glimpse is
    significantly above the strongest baseline in every setting, does not hold if one of these goes
    significantly the other way, otherwise inconclusive.
    """
    settings = evidence.where(partition="label_skew")
    found = average_saving(evidence, settings, "rounds", evidence.baselines)
    gaps = [over_strongest(evidence, [s]) for s in settings]
    faster, *higher = above_zero([None if found is None else found.share, *gaps])
    faster = faster if found is None else found.carries(faster)
    said = "–" if found is None else found.text
    return Finding(all_of([faster, *higher]), f"rounds saved: {said}; accuracy {counts(higher)}")
