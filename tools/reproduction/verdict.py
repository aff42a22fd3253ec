"""What can be said of a claim, from differences that are real or are not.

A difference is real by the report's own rule: its bootstrap 95 % interval leaves out zero, and the
t-test stays below 0.05 after Holm's correction, here over the differences that one claim needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fedglimpse.report.numbers import interval
from fedglimpse.stats.difference import Difference, holm


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


def above_zero(differences: Sequence[Difference | None]) -> list[Verdict]:
    """Say of each difference whether it is really above zero; None: its cells are missing."""
    adjusted = holm([None if d is None else d.p for d in differences])
    return [_sign(d, p) for d, p in zip(differences, adjusted, strict=True)]


def _sign(difference: Difference | None, p: float | None) -> Verdict:
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


def reaches(gain: Verdict, beyond: Verdict, difference: Difference | None) -> Verdict:
    """Judge a gain of a published size: real, with an interval that reaches that size.

    With few pairs a gain is seldom really smaller than any size; that alone must not carry it.

    Args:
        gain: whether ours minus theirs is above zero.
        beyond: whether the same minus the published gain is.
        difference: the same minus the published gain.
    """
    if beyond is Verdict.FAILS or gain is not Verdict.HOLDS or difference is None:
        return Verdict.FAILS if beyond is Verdict.FAILS else gain
    return Verdict.UNTOLD if difference.high is None or difference.high < 0 else gain


def points(difference: Difference | None, unit: str = "points") -> str:
    """Write a difference with its interval and the number of pairs behind it."""
    if difference is None:
        return "–"
    return f"{interval(difference)} {unit} ({difference.pairs} pairs)"


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


def smallest(differences: dict[str, Difference | None], unit: str = "points") -> str:
    """Write the least favourable of several differences, with its name."""
    return _extreme("smallest", differences, unit)


def largest(differences: dict[str, Difference | None], unit: str = "points") -> str:
    """Write the largest of several differences, with its name."""
    return _extreme("largest", differences, unit)


def _extreme(which: str, differences: dict[str, Difference | None], unit: str) -> str:
    known = {name: d for name, d in differences.items() if d is not None}
    if not known:
        return "–"
    sign = 1 if which == "smallest" else -1
    name = min(known, key=lambda n: sign * known[n].mean)
    return f"{which}: {name} {points(known[name], unit)}"
