"""What can be said of a claim, from differences that are real or are not.

A difference is real if its 95 % interval leaves out zero and its test stays below 0.05 after Holm's
correction, here over the differences that one claim needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fedglimpse.studies.report.numbers import interval
from fedglimpse.studies.statistics.difference import holm
from reproduction.pooling import Pooled


class Verdict(StrEnum):
    """The four answers."""

    HOLDS = "holds"
    FAILS = "does not hold"
    UNTOLD = "cannot be told"
    NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Finding:
    """What a rule found."""

    verdict: Verdict
    measured: str


def above_zero(differences: Sequence[Pooled | None]) -> list[Verdict]:
    """Say of each difference whether it is really above zero; None: its cells are missing."""
    adjusted = holm([None if d is None else d.p for d in differences])
    return [_sign(d, p) for d, p in zip(differences, adjusted, strict=True)]


def _sign(difference: Pooled | None, p: float | None) -> Verdict:
    if difference is None:
        return Verdict.NOT_RUN
    if difference.verdict(p) != "real":
        return Verdict.UNTOLD
    return Verdict.HOLDS if difference.mean > 0 else Verdict.FAILS


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Join parts that must all hold: one that fails settles it, missing cells do not."""
    for worst in (Verdict.FAILS, Verdict.NOT_RUN, Verdict.UNTOLD):
        if worst in verdicts:
            return worst
    return Verdict.HOLDS if verdicts else Verdict.NOT_RUN


def any_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Join parts of which one must hold: it fails only where all do."""
    for best in (Verdict.HOLDS, Verdict.NOT_RUN, Verdict.UNTOLD):
        if best in verdicts:
            return best
    return Verdict.FAILS if verdicts else Verdict.NOT_RUN


def at_least(count: int, verdicts: Sequence[Verdict]) -> Verdict:
    """Join parts of which `count` must hold, whatever the open ones turn out to be."""
    if verdicts.count(Verdict.HOLDS) >= count:
        return Verdict.HOLDS
    if len(verdicts) - verdicts.count(Verdict.FAILS) < count:
        return Verdict.FAILS
    return Verdict.NOT_RUN if Verdict.NOT_RUN in verdicts else Verdict.UNTOLD


def reaches(gain: Pooled | None, beyond: Pooled | None) -> Verdict:
    """Judge a gain of a published size: real, with an interval that reaches that size.

    With few seeds a gain is seldom really smaller than any size; that alone must not carry it. Each
    test carries one verdict alone, so neither is corrected for the other.

    Args:
        gain: ours minus theirs.
        beyond: the same minus the published gain.
    """
    (real,), (larger,) = above_zero([gain]), above_zero([beyond])
    if larger is Verdict.FAILS or real is not Verdict.HOLDS or beyond is None:
        return Verdict.FAILS if larger is Verdict.FAILS else real
    return Verdict.UNTOLD if beyond.high is None or beyond.high < 0 else real


def points(difference: Pooled | None, unit: str = "points") -> str:
    """Write a difference with its interval and the settings and seeds behind it."""
    if difference is None:
        return "–"
    seeds, settings = difference.seeds, difference.settings
    some = ", ".join(f"{data} {_seeds([n])}" for data, n in seeds.items())
    behind = some if len(set(seeds.values())) > 1 else _seeds(seeds.values())
    behind = behind if settings == 1 else f"{settings} settings, {behind}"
    text = f"{interval(difference)} {unit} ({behind})"
    if difference.told is not None:
        alone = " and ".join(difference.told.seeds)
        text += f", {alone} alone {interval(difference.told)}"
    return text


def _seeds(counts: Collection[int]) -> str:
    return "1 seed" if max(counts) == 1 else f"{max(counts)} seeds"


def counts(verdicts: Sequence[Verdict]) -> str:
    """Write in how many settings a difference is really above zero, below, open, or not run."""
    words = {
        Verdict.HOLDS: "really above",
        Verdict.FAILS: "really below",
        Verdict.UNTOLD: "open",
        Verdict.NOT_RUN: "not run",
    }
    said = [f"{word} in {verdicts.count(v)}" for v, word in words.items() if v in verdicts]
    return f"{', '.join(said)} of {len(verdicts)} settings"


def smallest(differences: dict[str, Pooled | None], unit: str = "points") -> str:
    """Write the least favourable of several differences, with its name."""
    return _extreme("smallest", differences, unit)


def largest(differences: dict[str, Pooled | None], unit: str = "points") -> str:
    """Write the largest of several differences, with its name."""
    return _extreme("largest", differences, unit)


def _extreme(which: str, differences: dict[str, Pooled | None], unit: str) -> str:
    known = {name: d for name, d in differences.items() if d is not None}
    if not known:
        return "–"
    sign = 1 if which == "smallest" else -1
    name = min(known, key=lambda n: sign * known[n].mean)
    text = f"{which}: {name} {points(known[name], unit)}"
    missing = [name for name in differences if name not in known]
    return f"{text}; not in all settings yet: {', '.join(missing)}" if missing else text
