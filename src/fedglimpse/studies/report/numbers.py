"""How numbers are written, the same in the terminal, in tables and on the page."""

from __future__ import annotations

import math

from fedglimpse.studies.statistics.difference import Difference, Spread
from fedglimpse.studies.statistics.to_target import ToTarget

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def percent(value: float | None, digits: int = 1) -> str:
    """Write a share as percent, without the percent sign."""
    return "–" if value is None else f"{100 * value:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """Write a difference of shares in points, always with a sign."""
    return f"{100 * value:+.{digits}f}".replace("-", "−")


def interval(difference: Difference) -> str:
    """Write `+1.2 [+0.3, +2.0]` in points, with the interval that the verdict is based on."""
    text = signed(difference.mean)
    if difference.low is None or difference.high is None:
        return text
    return f"{text} [{signed(difference.low)}, {signed(difference.high)}]"


def t_interval(difference: Difference) -> str:
    """Write `+1.2 [−0.1, +2.5]` in points, with the t interval."""
    text = signed(difference.mean)
    if difference.t_interval is None:
        return text
    low, high = difference.t_interval
    return f"{text} [{signed(low)}, {signed(high)}]"


def mean_and_std(spread: Spread) -> str:
    """Write `mean ± standard deviation over seeds` in percent."""
    if spread.std is None:
        return percent(spread.mean)
    return f"{percent(spread.mean)} ± {percent(spread.std)}"


def amount(value: float, unit: str) -> str:
    """Write an amount with a prefix: 1.20 GB, 340 GFLOP; plain numbers without a unit.

    Args:
        value: what to write.
        unit: B, FLOP, or nothing.
    """
    if not unit:
        return f"{value:,.0f}".replace(",", " ")
    return f"{_scaled(value, value)} {PREFIXES[_power(value)]}{unit}"


def cost(to_target: ToTarget, unit: str) -> str:
    """Write `12 [10–15]`, `≥ 40 (2 of 3)`, or `> 60 (0 of 3)`.

    A mean of only those runs that reached the target is never shown.

    Args:
        to_target: what every run spent.
        unit: as for `amount`.
    """
    mean = to_target.at_least
    if to_target.range is None:
        sign = "≥" if to_target.reached else ">"
        return f"{sign} {amount(mean, unit)} ({to_target.reached} of {len(to_target.runs)})"
    if len(to_target.runs) == 1:
        return amount(mean, unit)
    low, high = to_target.range
    if not unit:
        return f"{amount(mean, '')} [{amount(low, '')}–{amount(high, '')}]"
    prefix = PREFIXES[_power(mean)]
    return f"{_scaled(mean, mean)} [{_scaled(low, mean)}–{_scaled(high, mean)}] {prefix}{unit}"


def _power(value: float) -> int:
    """Return the power of 1000 whose prefix suits a value."""
    if value < 1:
        return 0
    return min(int(math.log10(value) // 3), len(PREFIXES) - 1)


def _scaled(value: float, reference: float) -> str:
    """Write a value with the prefix and the digits that suit the reference."""
    power = _power(reference)
    magnitude = reference / 1000**power
    if magnitude >= 100 or power == 0:
        digits = 0
    elif magnitude >= 10:
        digits = 1
    else:
        digits = 2
    return f"{value / 1000**power:.{digits}f}"


def p_value(p: float | None) -> str:
    """Write a p-value."""
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
