"""Choosing K clients as a set: exact search where that is cheap, greedy beyond.

A per-client score cannot say "these five together". The methods that need that (herd, dpp,
oracle-balance) give the value of a whole subset and leave the search to this file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

Value = Callable[[Tensor], Tensor]  # subsets as slots [B, K] -> their values [B]; larger is better

EXACT_LIMIT = 5_000  # subsets that are all tried; beyond, the search is greedy
RANDOM_STARTS = 3  # of the greedy search, besides the greedy one
TIE = 1e-9  # values nearer to the best than this share of their range count as equal to it


class Candidate(NamedTuple):
    """A subset and its value."""

    slots: Tensor  # [K]
    value: float


@dataclass(frozen=True)
class SubsetSearch:
    """The search for the subset of slots with the largest value."""

    value: Value
    num_slots: int
    generator: torch.Generator  # breaks ties, and draws where the greedy search starts

    def best(self, k: int) -> Tensor:
        """Return the best subset of min(k, slots), in rising order.

        Every subset is tried while there are at most `EXACT_LIMIT`; beyond, the search is greedy.
        """
        k = min(k, self.num_slots)
        if math.comb(self.num_slots, k) <= EXACT_LIMIT:
            return self.exact(k)
        return self.near_best(k).sort().values

    def exact(self, k: int) -> Tensor:
        """Return the best of all subsets of `k` slots."""
        best = self._best_of(all_subsets(self.num_slots, k))
        return best.slots.clone()

    def near_best(self, k: int) -> Tensor:
        """Improve a greedy and a few random subsets by swaps; returns the best of them."""
        starts: list[Tensor] = []
        for _ in range(RANDOM_STARTS):
            shuffled = torch.randperm(self.num_slots, generator=self.generator)
            starts.append(shuffled[:k])
        starts.append(self.greedy(k))
        improved = [self.improve(chosen) for chosen in starts]
        return self._best_of(torch.stack(improved)).slots

    def greedy(self, k: int) -> Tensor:
        """Add the slot that makes the best subset with those before it, `k` times."""
        chosen = torch.empty(0, dtype=torch.long)
        for _ in range(k):
            unused = self._unused_slots(chosen)[:, None]  # [B, 1]
            prefix = chosen.expand(len(unused), -1)  # [B, taken]
            extended = torch.cat([prefix, unused], dim=1)  # [B, taken + 1]
            chosen = self._best_of(extended).slots
        return chosen

    def improve(self, chosen: Tensor) -> Tensor:
        """Swap chosen slots for others, one at a time, until no single swap is better."""
        first_value = self.value(chosen.unsqueeze(0))
        best = Candidate(chosen, float(first_value))
        improved = True
        while improved:
            improved = False
            for position in range(len(chosen)):
                unused = self._unused_slots(best.slots)
                swapped = best.slots.repeat(len(unused), 1)  # [B, K]
                swapped[:, position] = unused
                candidate = self._best_of(swapped)
                slack = TIE * abs(best.value)
                if candidate.value > best.value + slack:
                    best = candidate
                    improved = True
        return best.slots

    def _unused_slots(self, chosen: Tensor) -> Tensor:
        """Return the slots that are not chosen, in rising order."""
        slots = torch.arange(self.num_slots)
        return slots[~torch.isin(slots, chosen)]

    def _best_of(self, subsets: Tensor) -> Candidate:
        """Return the best of subsets `[B, K]`; ties, up to rounding, are broken at random."""
        values = self.value(subsets)
        largest = values.max()
        slack = TIE * (largest - values.min())
        is_tied = values >= largest - slack
        ties = is_tied.nonzero().flatten()
        rank = torch.randint(len(ties), (), generator=self.generator)
        drawn = ties[rank]
        return Candidate(subsets[drawn], float(values[drawn]))


@lru_cache(maxsize=64)
def all_subsets(num: int, k: int) -> Tensor:
    """Return all subsets of `k` slots out of `num` `[B, K]`; cached, so do not change it."""
    subsets = list(itertools.combinations(range(num), k))  # torch's own takes memory for num ** k
    slots = torch.tensor(subsets, dtype=torch.long)
    return slots.view(len(subsets), k)
