"""Counter-based randomness: every draw is a function of (seed, purpose, counters).

Nothing here has a state that must be saved: round 17 of lane 3 draws the same numbers whether it
runs alone, beside other lanes, batched, one by one, or after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

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
_SQRT_HALF = 0.7071067811865476
_LOG_TERMS = 12  # of the series: the next one is below the last bit


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


def mix(values: Tensor) -> Tensor:
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


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of numbers that are not negative, float64.

    It is made of additions, multiplications and divisions, which IEEE 754 defines to the last bit,
    so that it is the same with every library and on every machine; `torch.log` is not. With
    x = m 2^e and s = (m - 1) / (m + 1) it is e log 2 + 2 (s + s^3 / 3 + s^5 / 5 + ...).
    """
    mantissa, exponent = torch.frexp(x)
    below = mantissa < _SQRT_HALF
    mantissa = torch.where(below, 2 * mantissa, mantissa)  # in [sqrt(1/2), sqrt(2))
    exponent = torch.where(below, exponent - 1, exponent)
    s = (mantissa - 1) / (mantissa + 1)
    square = s * s
    series = torch.zeros_like(s)
    for term in reversed(range(_LOG_TERMS)):
        series = series * square + 1 / (2 * term + 1)
    result = exponent.double() * _LOG_2 + 2 * s * series
    return torch.where(x > 0, result, -torch.inf)
