"""Student's t: how wide an interval of few values is, and how rare a mean is by luck.

From `scipy.special`, because importing `scipy.stats` takes every command another half second.
"""

from __future__ import annotations

from scipy.special import stdtr, stdtrit


def half_width(error: float, freedom: float, level: float = 0.05) -> float:
    """Return half of the interval of a mean, the 95 % one unless said otherwise.

    Args:
        error: standard error of the mean.
        freedom: degrees of freedom; need not be whole.
        level: how often it may miss.
    """
    return float(stdtrit(freedom, 1 - level / 2)) * error


def p_of_zero(mean: float, error: float, freedom: float) -> float:
    """Return the two-sided p-value of a mean of zero, for a standard error above zero."""
    return 2 * float(stdtr(freedom, -abs(mean) / error))
