"""Verdicts on a claim, from differences that are significant or not.

A difference is significant if its 95 % interval excludes zero and its test stays below 0.05 after
Holm's correction, here over the differences that one claim needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from fedglimpse.studies.report.numbers import interval
from fedglimpse.studies.statistics.difference import SIGNIFICANT, holm
from reproduction.pooling import Pooled


class Verdict(StrEnum):
    """The four answers."""

    HOLDS = "holds"
    FAILS = "does not hold"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Finding:
    """The result of a rule: its verdict, and the numbers behind it in words."""

    verdict: Verdict
    measured: str


COUNT_WORDS = {
    Verdict.HOLDS: "significantly above",
    Verdict.FAILS: "significantly below",
    Verdict.INCONCLUSIVE: "open",
    Verdict.NOT_RUN: "not run",
}


def above_zero(differences: Sequence[Pooled | None]) -> list[Verdict]:
    """Judge whether each difference is significantly above zero; None: its cells are missing."""
    adjusted = holm([None if d is None else d.p for d in differences])
    return [_above_zero(d, p) for d, p in zip(differences, adjusted, strict=True)]


def _above_zero(difference: Pooled | None, adjusted_p: float | None) -> Verdict:
    if difference is None:
        return Verdict.NOT_RUN
    if difference.verdict(adjusted_p) != SIGNIFICANT:
        return Verdict.INCONCLUSIVE
    return Verdict.HOLDS if difference.mean > 0 else Verdict.FAILS


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine conditions that must all hold: one that fails settles it, missing cells do not."""
    for worst in (Verdict.FAILS, Verdict.NOT_RUN, Verdict.INCONCLUSIVE):
        if worst in verdicts:
            return worst
    return Verdict.HOLDS if verdicts else Verdict.NOT_RUN


def any_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine conditions of which one must hold: it fails only if all do."""
    for best in (Verdict.HOLDS, Verdict.NOT_RUN, Verdict.INCONCLUSIVE):
        if best in verdicts:
            return best
    return Verdict.FAILS if verdicts else Verdict.NOT_RUN


def at_least(count: int, verdicts: Sequence[Verdict]) -> Verdict:
    """Combine conditions of which `count` must hold, whatever the open ones turn out to be."""
    if verdicts.count(Verdict.HOLDS) >= count:
        return Verdict.HOLDS
    if len(verdicts) - verdicts.count(Verdict.FAILS) < count:
        return Verdict.FAILS
    return Verdict.NOT_RUN if Verdict.NOT_RUN in verdicts else Verdict.INCONCLUSIVE


def reaches(gain: Pooled | None, beyond: Pooled | None) -> Verdict:
    """Judge a gain of a published size: significant, with an interval that reaches that size.

    With few seeds a gain is seldom significantly smaller than any size; that alone must not
    confirm it. Each test carries one verdict alone, so neither is corrected for the other.

    Args:
        gain: ours minus theirs.
        beyond: the same minus the published gain.
    """
    (is_gain,) = above_zero([gain])
    (is_larger,) = above_zero([beyond])
    if is_larger is Verdict.FAILS:
        return Verdict.FAILS
    if is_gain is not Verdict.HOLDS or beyond is None:
        return is_gain
    reaches_size = beyond.high is not None and beyond.high >= 0
    return Verdict.HOLDS if reaches_size else Verdict.INCONCLUSIVE


def points(difference: Pooled | None, unit: str = "points") -> str:
    """Write a difference with its interval and the settings and seeds behind it."""
    if difference is None:
        return "–"
    behind = _seeds_behind(difference)
    if difference.settings > 1:
        behind = f"{difference.settings} settings, {behind}"
    text = f"{interval(difference)} {unit} ({behind})"
    if difference.with_more_seeds is not None:
        data = " and ".join(difference.with_more_seeds.seeds)
        text += f", {data} alone {interval(difference.with_more_seeds)}"
    return text


def _seeds_behind(difference: Pooled) -> str:
    """Write how many seeds there are, for each data set if they differ."""
    counts = set(difference.seeds.values())
    if len(counts) == 1:
        return _seeds(counts.pop())
    return ", ".join(f"{data} {_seeds(count)}" for data, count in difference.seeds.items())


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def counts(verdicts: Sequence[Verdict]) -> str:
    """Write in how many settings a difference is significantly above zero, below, or open."""
    texts: list[str] = []
    for verdict, words in COUNT_WORDS.items():
        if verdict in verdicts:
            texts.append(f"{words} in {verdicts.count(verdict)}")
    return f"{', '.join(texts)} of {len(verdicts)} settings"


def smallest(differences: Mapping[str, Pooled | None], unit: str = "points") -> str:
    """Write the least favourable of several differences, with its name."""
    return _extreme("smallest", differences, unit)


def largest(differences: Mapping[str, Pooled | None], unit: str = "points") -> str:
    """Write the largest of several differences, with its name."""
    return _extreme("largest", differences, unit)


def _extreme(which: str, differences: Mapping[str, Pooled | None], unit: str) -> str:
    means: dict[str, float] = {}
    missing: list[str] = []
    for name, difference in differences.items():
        if difference is None:
            missing.append(name)
        else:
            means[name] = difference.mean
    if not means:
        return "–"
    pick = min if which == "smallest" else max
    name = pick(means, key=means.__getitem__)
    text = f"{which}: {name} {points(differences[name], unit)}"
    return f"{text}; not in all settings yet: {', '.join(missing)}" if missing else text
