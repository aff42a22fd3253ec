"""Choosing K clients as a set: exact search where that is cheap, greedy beyond.

A per-client score cannot say "these five together". The methods that need that (herd, dpp,
oracle-balance) give the value of a whole subset and leave the search to this file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

Value = Callable[[Tensor], Tensor]  # subsets as slots [B, K] -> their values [B]; larger is better

EXACT_LIMIT = 5_000  # subsets that are all tried; beyond, the search is greedy
RANDOM_STARTS = 3  # of the greedy search, besides the greedy one
TIE = 1e-9  # values nearer to the best than this share of their range count as equal to it


def best_subset(value: Value, num: int, k: int, generator: torch.Generator) -> Tensor:
    """Return the slots of the best subset of min(k, num) out of `num`, in rising order.

    Every subset is tried while there are at most `EXACT_LIMIT`; beyond, the search is greedy.
    Ties are broken at random.
    """
    k = min(k, num)
    if math.comb(num, k) <= EXACT_LIMIT:
        return exact_subset(value, num, k, generator)
    return near_best_subset(value, num, k, generator).sort().values


def exact_subset(value: Value, num: int, k: int, generator: torch.Generator) -> Tensor:
    """Return the best of all subsets of `k` slots."""
    subsets = all_subsets(num, k)
    return subsets[_argmax(value(subsets), generator)].clone()


@lru_cache(maxsize=64)
def all_subsets(num: int, k: int) -> Tensor:
    """Return all subsets of `k` slots out of `num` `[B, K]`; cached, so do not change it."""
    subsets = list(itertools.combinations(range(num), k))  # torch's own takes memory for num ** k
    return torch.tensor(subsets, dtype=torch.long).view(len(subsets), k)


def near_best_subset(value: Value, num: int, k: int, generator: torch.Generator) -> Tensor:
    """Improve a greedy and a few random subsets by swaps; returns the best of them."""
    starts = [torch.randperm(num, generator=generator)[:k] for _ in range(RANDOM_STARTS)]
    starts.append(greedy_subset(value, num, k, generator))
    improved = [improve(value, chosen, num, generator) for chosen in starts]
    subsets = torch.stack(improved)  # [B, K]
    return subsets[_argmax(value(subsets), generator)]


def greedy_subset(value: Value, num: int, k: int, generator: torch.Generator) -> Tensor:
    """Add the slot that makes the best subset with those before it, `k` times."""
    chosen = torch.empty(0, dtype=torch.long)
    for _ in range(k):
        unused = _unused_slots(chosen, num)[:, None]  # [B, 1]
        prefix = chosen.expand(len(unused), -1)  # [B, taken]
        candidates = torch.cat([prefix, unused], dim=1)
        chosen = candidates[_argmax(value(candidates), generator)]
    return chosen


def improve(value: Value, chosen: Tensor, num: int, generator: torch.Generator) -> Tensor:
    """Swap chosen slots for others, one at a time, until no single swap is better."""
    best_value = float(value(chosen[None]))
    improved = True
    while improved:
        improved = False
        for position in range(len(chosen)):
            unused = _unused_slots(chosen, num)
            candidates = chosen.repeat(len(unused), 1)  # [B, K]
            candidates[:, position] = unused
            values = value(candidates)
            best = _argmax(values, generator)
            if float(values[best]) > best_value + TIE * abs(best_value):
                chosen = candidates[best]
                best_value = float(values[best])
                improved = True
    return chosen


def _unused_slots(chosen: Tensor, num: int) -> Tensor:
    """Return the slots out of `num` that are not chosen, in rising order."""
    slots = torch.arange(num)
    return slots[~torch.isin(slots, chosen)]


def _argmax(values: Tensor, generator: torch.Generator) -> int:
    """Return the position of the largest value; ties, up to rounding, are broken at random."""
    slack = TIE * (values.max() - values.min())
    ties = (values >= values.max() - slack).nonzero().flatten()
    return int(ties[torch.randint(len(ties), (), generator=generator)])
