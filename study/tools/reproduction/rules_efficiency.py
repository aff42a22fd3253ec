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
from fedglimpse.studies.statistics.to_target import (
    AT_LEAST,
    AT_MOST,
    EXACT,
    UNKNOWN,
    Saving,
    Spent,
    saving,
)
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
        """The average, written as the bound it is."""
        if self.bounds == {EXACT}:
            qualifier = ""
        elif self.bounds <= {EXACT, AT_LEAST}:
            qualifier = "at least "
        elif self.bounds <= {EXACT, AT_MOST}:
            qualifier = "at most "
        else:
            qualifier = "as far as known, "
        return qualifier + points(self.share, "%")

    def carries(self, verdict: Verdict) -> Verdict:
        """Return a verdict, unless bounds leave it open."""
        open_bounds = {Verdict.HOLDS: {AT_MOST, UNKNOWN}, Verdict.FAILS: {AT_LEAST, UNKNOWN}}
        is_open = self.bounds & open_bounds.get(verdict, set())
        return Verdict.INCONCLUSIVE if is_open else verdict


def _runs(evidence: Evidence, setting: str, variant: str, measure: str) -> dict[int, Spent]:
    """Return what each run spent that has ended, finished or failed."""
    ended = [c for c in evidence.study.of(setting, variant) if c.state in ("finished", "failed")]
    return spent(ended, measure, evidence.study.targets[setting])


def _savings(
    evidence: Evidence, setting: str, measure: str, baselines: Sequence[str]
) -> dict[int, list[Saving]]:
    """Return seed -> savings over all baselines, of the seeds that every one of them has."""
    baseline_runs = [_runs(evidence, setting, baseline, measure) for baseline in baselines]
    savings: dict[int, list[Saving]] = {}
    for seed, run in _runs(evidence, setting, OURS, measure).items():
        savings_of_seed: list[Saving] = []
        for runs in baseline_runs:
            saved = saving([run], [runs[seed]]) if seed in runs else None
            if saved is not None:
                savings_of_seed.append(saved)
        if len(savings_of_seed) == len(baselines):
            savings[seed] = savings_of_seed
    return savings


def average_saving(
    evidence: Evidence,
    settings: Sequence[str],
    measure: str,
    baselines: Sequence[str],
    published: float = 0.0,
) -> Average | None:
    """Return savings until the targets, pooled over settings; None where one is not run."""
    bounds: set[str] = set()
    shares_of: dict[str, list[Values]] = {}  # by data
    beyond_of: dict[str, list[Values]] = {}
    for setting in settings:
        shares: Values = {}
        beyond_published: Values = {}
        for seed, savings in _savings(evidence, setting, measure, baselines).items():
            shares[seed] = fmean(saved.share for saved in savings)
            beyond_published[seed] = shares[seed] - published
            bounds.update(saved.bound for saved in savings)
        shares_of.setdefault(evidence.data(setting), []).append(shares)
        beyond_of.setdefault(evidence.data(setting), []).append(beyond_published)
    share = pool(shares_of)
    beyond = pool(beyond_of)
    if share is None or beyond is None:
        return None
    return Average(share, beyond, frozenset(bounds))


def _saves(evidence: Evidence, partition: str, measure: str, baselines: Sequence[str]) -> Finding:
    settings = evidence.where(partition=partition)
    saved = average_saving(evidence, settings, measure, baselines, evidence.share)
    if saved is None:
        return Finding(Verdict.NOT_RUN, "–")
    return Finding(saved.carries(reaches(saved.share, saved.beyond)), saved.text)


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
    saved = average_saving(evidence, settings, "rounds", evidence.baselines)
    gaps = [over_strongest(evidence, [setting]) for setting in settings]
    faster, *higher = above_zero([None if saved is None else saved.share, *gaps])
    rounds = "–"
    if saved is not None:
        faster = saved.carries(faster)
        rounds = saved.text
    return Finding(all_of([faster, *higher]), f"rounds saved: {rounds}; accuracy {counts(higher)}")
