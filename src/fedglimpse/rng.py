"""Counter-based randomness: every draw is a function of (seed, purpose, counters).

Nothing here has a state that must be saved: round 17 of lane 3 draws the same numbers whether it
runs alone, beside other lanes, batched, one by one, or after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_LAST = torch.iinfo(torch.int64).max


def key(seed: int, purpose: str, *counter: int) -> int:
    """Hash (seed, purpose, counters) into 63 bits; the root of every random draw."""
    return _hash(f"{seed}|{purpose}|" + ",".join(map(str, counter)))


def keys(seed: int, purpose: str, counter: int, last: Iterable[int]) -> list[int]:
    """Return `key(seed, purpose, counter, i)` for every i of `last`."""
    begin = f"{seed}|{purpose}|{counter},"
    return [_hash(f"{begin}{i}") for i in last]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *counter: int) -> torch.Generator:
    """Return a fresh CPU generator for this purpose and these counters."""
    return torch.Generator().manual_seed(key(seed, purpose, *counter))


def shuffles(seed: int, purpose: str, counter: int, times: int, size: int) -> Tensor:
    """Return random orders of 0..size-1, the i-th from `generator(seed, purpose, counter, i)`.

    One generator is seeded again and again, which costs less than a new one for every order.

    Returns:
        One order in each row.  # [times, size]
    """
    source = torch.Generator()
    orders = []
    for order_key in keys(seed, purpose, counter, range(times)):
        orders.append(torch.randperm(size, generator=source.manual_seed(order_key)))
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
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def hashed(keys: Tensor, purpose: int | Tensor, width: int) -> Tensor:
    """Return `width` pseudo-random non-negative 63-bit integers for every key.

    Args:
        keys: one key for each row.  # [J] int64
        purpose: separates streams that share a key (epoch number, crop, flip, ...).  # [] or int
        width: numbers in a row.
    """
    columns = torch.arange(width, device=keys.device)  # [W]
    rows = mix(keys + mix(torch.zeros_like(keys) + purpose))  # [J]
    return mix(rows[:, None] + columns * _GOLDEN) & _LAST  # [J, W]


def permutations(keys: Tensor, purpose: int | Tensor, sizes: Tensor, width: int) -> Tensor:
    """Return a random order of 0..size-1 for every row, padding positions last.

    Args:
        keys: one key for each row.  # [J] int64
        purpose: e.g. the epoch number.
        sizes: valid entries of each row.  # [J]
        width: row length, at least the largest size.
    """
    draws = hashed(keys, purpose, width)
    padding = torch.arange(width, device=keys.device) >= sizes[:, None]
    return torch.argsort(draws.masked_fill(padding, _LAST), dim=1, stable=True)  # [J, W]
