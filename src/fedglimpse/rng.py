"""Counter-based randomness: every draw is a function of (seed, purpose, counters).

Nothing here has a state that must be saved: round 17 of lane 3 draws the same numbers whether it
runs alone, beside other lanes, batched, one by one, or after a restart.

Of torch's own draws only those are used whose numbers are the same in all its versions that this
package allows: `rand`, `randperm` and `randint` below 2^28. What is drawn by weights (`sample`,
`choices`) or from a Dirichlet distribution (`dirichlet`) is computed here, from the integers of
SplitMix64 with operations that IEEE 754 defines to the last bit. `tests/test_draws.py` has their
numbers; where they change, `version.DRAWS` does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# The constants of splitmix64 as signed 64-bit integers.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_LOW_33_BITS = (1 << 33) - 1
_LOW_34_BITS = (1 << 34) - 1
_LOW_37_BITS = (1 << 37) - 1
_LAST = torch.iinfo(torch.int64).max
_LOG_2 = 0.6931471805599453
_LOG_2_HIGH = 0.693147180369123816490  # its first 32 bits, whose small multiples are exact
_LOG_2_LOW = 1.90821492927058770002e-10  # the rest
_SQRT_HALF = 0.7071067811865476
_LOG_TERMS = 12  # of the series: the next one is below the last bit
_EXP_TERMS = 15
_LEAST_ALPHA = 1e-300  # so that 1 / alpha is finite
_ATTEMPTS = 6  # at a time, to draw from a gamma distribution

Floats = npt.NDArray[np.float64]
Integers = TypeVar("Integers", Tensor, npt.NDArray[np.int64])


def key(seed: int, purpose: str, *counter: int) -> int:
    """Hash (seed, purpose, counters) into 63 bits; the root of every random draw."""
    counters = ",".join(map(str, counter))
    text = f"{seed}|{purpose}|{counters}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, purpose: str, *counter: int) -> torch.Generator:
    """Return a fresh CPU generator for this purpose and these counters."""
    source = torch.Generator()
    return source.manual_seed(key(seed, purpose, *counter))


def shuffles(seed: int, purpose: str, counter: int, times: int, size: int) -> Tensor:
    """Return random orders of 0..size-1, the i-th from `generator(seed, purpose, counter, i)`.

    One generator is seeded again and again, which costs less than a new one for every order.

    Returns:
        One order in each row.  # [times, size]
    """
    source = torch.Generator()
    orders = []
    for i in range(times):
        source.manual_seed(key(seed, purpose, counter, i))
        order = torch.randperm(size, generator=source)
        orders.append(order)
    return torch.stack(orders)


@contextmanager
def isolated(seed: int, purpose: str, *counter: int) -> Iterator[None]:
    """Seed torch's default generator inside the block and put it back afterwards.

    Only for code that cannot take a generator: layer constructors and user model factories.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(key(seed, purpose, *counter))
        yield


def mix(values: Integers) -> Integers:
    """Scramble 64-bit integers (the splitmix64 finaliser); same bits on every device."""
    z = values + _GOLDEN
    shifted = (z >> 30) & _LOW_34_BITS  # without the copies of the sign that come in from the left
    z = (z ^ shifted) * _MIX_1
    shifted = (z >> 27) & _LOW_37_BITS
    z = (z ^ shifted) * _MIX_2
    shifted = (z >> 31) & _LOW_33_BITS
    return z ^ shifted


def hashed(keys: Tensor, purpose: int | Tensor, width: int) -> Tensor:
    """Return `width` pseudo-random non-negative 63-bit integers for every key.

    Args:
        keys: one key for each row.  # [J] int64
        purpose: separates streams that share a key (epoch number, crop, flip, ...).  # [] or int
        width: numbers in a row.
    """
    purposes = torch.zeros_like(keys) + purpose  # [J]
    rows = mix(keys + mix(purposes))  # [J]
    columns = torch.arange(width, device=keys.device) * _GOLDEN  # [W]
    numbers = mix(rows[:, None] + columns)  # [J, W]
    return numbers & _LAST


def permutations(keys: Tensor, purpose: int | Tensor, sizes: Tensor, width: int) -> Tensor:
    """Return a random order of 0..size-1 for every row, padding positions last.

    Args:
        keys: one key for each row.  # [J] int64
        purpose: e.g. the epoch number.
        sizes: valid entries of each row.  # [J]
        width: row length, at least the largest size.
    """
    draws = hashed(keys, purpose, width)
    columns = torch.arange(width, device=keys.device)
    is_padding = columns >= sizes[:, None]
    draws = draws.masked_fill(is_padding, _LAST)
    return torch.argsort(draws, dim=1, stable=True)  # [J, W]


def uniform(keys: Tensor, purpose: int | Tensor, width: int) -> Tensor:
    """Return uniform numbers in [0, 1), multiples of 2^-53, from the integers of `hashed`.

    Args:
        keys: one key for each row.  # [J] int64
        purpose: separates streams that share a key.
        width: numbers in a row.

    Returns:
        float64, the same bits on every machine.  # [J, width]
    """
    return (hashed(keys, purpose, width) >> 10).double() * 2.0**-53


class Numbers:
    """Uniform numbers in [0, 1) from SplitMix64: multiples of 2^-53, the same on every machine."""

    def __init__(self, source: torch.Generator) -> None:
        """Begin with a seed of 63 bits that is drawn from `source`."""
        high, middle, low = torch.randint(1 << 21, (3,), generator=source).tolist()
        self._seed = high << 42 | middle << 21 | low
        self._taken = 0

    def take(self, *shape: int) -> Floats:
        """Return the next numbers."""
        first = self._taken
        self._taken += math.prod(shape)
        counters = np.arange(first, self._taken, dtype=np.int64)
        integers = mix(counters * _GOLDEN + self._seed) & _LAST
        return ((integers >> 10) * 2.0**-53).reshape(shape)


def sample(weights: Tensor, count: int, source: torch.Generator) -> Tensor:
    """Draw positions without replacement, each time in proportion to the weights that remain.

    As in an exponential race: with E exponential, the position with the smallest E / weight comes
    first, which it does with a probability proportional to its weight, then the next one.

    Args:
        weights: at least `count` of them above zero.  # [n]
        count: how many positions.
        source: seeds the draw.

    Returns:
        The positions in the order in which they were drawn.  # [count]
    """
    values = weights.double().numpy()
    exponential = -_log(1 - Numbers(source).take(len(values)))
    finish = np.full(len(values), np.inf)
    np.divide(exponential, values, out=finish, where=values > 0)
    order = finish.argsort(kind="stable")
    return torch.from_numpy(order[:count])


def choices(weights: Tensor, count: int, source: torch.Generator) -> Tensor:
    """Draw `count` positions with replacement, in proportion to the weights `[n]`.

    Args:
        weights: at least one of them above zero.  # [n]
        count: how many positions.
        source: seeds the draw.
    """
    ends = weights.double().numpy().cumsum()  # one after the other, so the same on every machine
    levels = Numbers(source).take(count) * ends[-1]  # below the last end
    return torch.from_numpy(ends.searchsorted(levels, side="right"))  # [count]


def dirichlet(alpha: float, shape: tuple[int, int], source: torch.Generator) -> Tensor:
    """Draw rows from Dir(alpha), in logarithms so that a tiny alpha cannot give 0 / 0.

    If G ~ Gamma(alpha + 1) and U ~ Uniform(0, 1), then G * U^(1 / alpha) ~ Gamma(alpha).

    Args:
        alpha: concentration, the same for all columns.
        shape: rows and columns.
        source: seeds the draw.

    Returns:
        Rows that sum to 1, float64.  # [shape]
    """
    alpha = max(alpha, _LEAST_ALPHA)
    numbers = Numbers(source)
    u = 1 - numbers.take(*shape)  # (0, 1]
    log_gamma = _log_gamma_above_1(alpha, u.size, numbers).reshape(shape)
    logarithms = log_gamma + _log(u) / alpha
    powers = _exp(logarithms - logarithms.max(1, keepdims=True))
    return torch.from_numpy(powers / powers.cumsum(1)[:, -1:])


def _log_gamma_above_1(alpha: float, count: int, numbers: Numbers) -> Floats:
    """Draw log(G / alpha) with G ~ Gamma(alpha + 1), `count` times.

    By Best's rejection from Student's t with two degrees of freedom: Devroye, "Non-Uniform Random
    Variate Generation", 1986, page 410, algorithm XG. Of several attempts the first counts that is
    accepted; where none is, others are drawn.
    """
    spread = 3 * alpha + 2.25
    log_gamma = np.empty(count)
    pending = np.arange(count)
    while pending.size:
        u, v = numbers.take(2, pending.size, _ATTEMPTS)  # [J, attempts] each
        w = u * (1 - u)
        with np.errstate(divide="ignore"):  # u = 0 is rejected
            y = np.sqrt(spread / w) * (u - 0.5)
        ratio = (alpha + y) / alpha
        log_z, log_ratio = _log(np.stack([64 * w * w * w * v * v, ratio]))
        with np.errstate(invalid="ignore"):
            accepted = (ratio > 0) & (log_z <= 2 * (alpha * log_ratio - y))
        first = accepted.argmax(1)
        is_drawn = accepted.any(1)
        drawn = log_ratio[np.arange(pending.size), first]
        log_gamma[pending[is_drawn]] = drawn[is_drawn]
        pending = pending[~is_drawn]
    return log_gamma


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of numbers that are not negative, float64, as `_log` does."""
    return torch.from_numpy(_log(x.numpy()))


def _log(x: Floats) -> Floats:
    """Return the natural logarithm; minus infinity where there is none.

    It is made of additions, multiplications and divisions, which IEEE 754 defines to the last bit,
    so that it is the same with every library and on every machine; those of libraries are not.
    Where x = m 2^e and s = (m - 1) / (m + 1) it is e log 2 + 2 (s + s^3 / 3 + s^5 / 5 + ...).
    """
    mantissa, exponent = np.frexp(x)
    below = mantissa < _SQRT_HALF
    mantissa = np.where(below, 2 * mantissa, mantissa)  # in [sqrt(1/2), sqrt(2))
    exponent = exponent - below
    with np.errstate(invalid="ignore", divide="ignore"):  # of numbers that have no logarithm
        s = (mantissa - 1) / (mantissa + 1)
        square = s * s
        series = np.zeros_like(s)
        for term in reversed(range(_LOG_TERMS)):
            series = series * square + 1 / (2 * term + 1)
        result = exponent * _LOG_2 + 2 * s * series
    return np.where(x > 0, result, -np.inf)


def _exp(x: Floats) -> Floats:
    """Return e^x of numbers that are not above zero; 0 below -700.

    Made like `_log`: where x = k log 2 + r it is 2^k (1 + r + r^2 / 2! + r^3 / 3! + ...).
    """
    inside = np.maximum(x, -700.0)
    power = np.rint(inside / _LOG_2)
    rest = inside - power * _LOG_2_HIGH - power * _LOG_2_LOW
    series = np.ones_like(rest)
    for term in reversed(range(1, _EXP_TERMS)):
        series = series * rest / term + 1
    return np.where(x < -700, 0.0, np.ldexp(series, power.astype(np.int32)))
