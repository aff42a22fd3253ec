"""How numbers are written, the same in the terminal, in tables and on the page."""

from __future__ import annotations

import math

from fedglimpse.studies.statistics.censored import ToTarget
from fedglimpse.studies.statistics.difference import COVERAGE, Difference
from fedglimpse.studies.statistics.spread import Spread

MEASURES: dict[str, tuple[str, str]] = {  # name -> (what it is, unit)
    "rounds": ("rounds", ""),
    "uplink_bytes": ("uplink", "B"),
    "downlink_bytes": ("downlink", "B"),
    "client_flops": ("client compute", "FLOP"),
    "server_flops": ("server compute", "FLOP"),
}
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def percent(value: float | None, digits: int = 1) -> str:
    """Write a share as percent, without the sign."""
    return "–" if value is None else f"{100 * value:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """Write a difference of shares in points, always with a sign."""
    text = f"{100 * value:+.{digits}f}"
    return text.replace("-", "−")


def interval(difference: Difference) -> str:
    """Write `+1.2 [+0.3, +2.0]` in points."""
    text = signed(difference.mean)
    if difference.low is None or difference.high is None:
        return text
    return f"{text} [{signed(difference.low)}, {signed(difference.high)}]"


def covers() -> str:
    """Say how often bootstrap 95 % intervals of few pairs cover the truth."""
    shares = "/".join(str(round(100 * share)) for share in COVERAGE.values())
    return (
        f"covers the truth in about {shares} % of studies with {'/'.join(map(str, COVERAGE))} pairs"
    )


def mean_and_std(spread: Spread) -> str:
    """Write `mean ± standard deviation over seeds` in percent."""
    if spread.std is None:
        return percent(spread.mean)
    return f"{percent(spread.mean)} ± {percent(spread.std)}"


def amount(value: float, unit: str, like: float | None = None) -> str:
    """Write an amount with a prefix: 1.2 GB, 340 GFLOP; plain numbers without a unit.

    Args:
        value: what to write.
        unit: B, FLOP, or nothing.
        like: take the prefix that this amount has.
    """
    if not unit:
        return f"{value:,.0f}".replace(",", " ")
    return f"{_scaled(value, like)} {_prefix(value if like is None else like)[1]}{unit}"


def cost(found: ToTarget, unit: str) -> str:
    """Write `12 [10–15]`, `≥ 40 (2 of 3)`, or `> 60 (0 of 3)`: never a mean of the lucky ones."""
    mean, ends = found.at_least, found.range
    if ends is None:
        sign = "≥" if found.reached else ">"
        return f"{sign} {amount(mean, unit)} ({found.reached} of {len(found.runs)})"
    if len(found.runs) == 1:
        return amount(mean, unit)
    shown = [_scaled(end, mean) if unit else amount(end, unit) for end in (mean, *ends)]
    return f"{shown[0]} [{shown[1]}–{shown[2]}] {_prefix(mean)[1] if unit else ''}{unit}".strip()


def _prefix(value: float) -> tuple[int, str]:
    power = min(int(math.log10(value) // 3), len(_PREFIXES) - 1) if value >= 1 else 0
    return power, _PREFIXES[power]


def _scaled(value: float, like: float | None = None) -> str:
    power, _ = _prefix(value if like is None else like)
    measure = (value if like is None else like) / 1000**power
    digits = 0 if measure >= 100 or power == 0 else 1 if measure >= 10 else 2
    return f"{value / 1000**power:.{digits}f}"


def p_value(p: float | None) -> str:
    """Write a p-value."""
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
