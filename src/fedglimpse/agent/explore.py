"""When and how the agent explores: the paper's epsilon-greedy rule and the release's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Ask(NamedTuple):
    """Scores of one lane that shall become a choice; names as in `pick`."""

    scores: Tensor  # [V]
    k: int
    eps: float
    generator: torch.Generator


class Picked(NamedTuple):
    """Chosen slots and how they came about."""

    slots: Tensor  # [min(K, V)] distinct
    behaviour: str  # "greedy", "explore" or "partial"
    greedy_share: float  # of the slots, those chosen by Q


def epsilon(step: int, decay: float, least: float) -> float:
    """Return max(least, 1 - decay * step), Algorithm 1 line 8."""
    return max(least, 1.0 - decay * step)


def best_slots(scores: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Return the min(k, V) slots with the highest scores; ties fall by `generator`, not index."""
    shuffled = torch.randperm(len(scores), generator=generator)
    order = torch.argsort(scores[shuffled], descending=True, stable=True)
    return shuffled[order[:k]]


def pick(
    scores: Tensor,
    k: int,
    eps: float,
    rule: str,
    partial: int,
    generator: torch.Generator,
) -> Picked:
    """Choose min(k, V) slots: by score, or with probability `eps` at random.

    Args:
        scores: Q of the visible clients.  # [V]
        k: K, the budget.
        eps: probability of exploring.
        rule: "all" draws the whole set at random (the paper); "partial" keeps the best K - m by
            score and draws the other m among the rest (the release).
        partial: m.
        generator: of this round.
    """
    k = min(k, len(scores))
    exploring = torch.rand((), generator=generator).item() < eps
    ranked = best_slots(scores, len(scores), generator)
    if not exploring:
        return Picked(ranked[:k], "greedy", 1.0)
    kept = max(k - partial, 0) if rule == "partial" else 0
    rest = ranked[kept:]
    order = torch.randperm(len(rest), generator=generator)
    drawn = rest[order[: k - kept]]
    behaviour = "partial" if rule == "partial" else "explore"
    return Picked(torch.cat([ranked[:kept], drawn]), behaviour, kept / k)


def pick_each(asked: Sequence[Ask], rule: str, partial: int) -> list[Picked]:
    """Choose in several lanes as `pick` does, by the same draws; sets of one size at once."""
    exploring = [torch.rand((), generator=one.generator).item() < one.eps for one in asked]
    picked = []
    for one, explores, ranked in zip(asked, exploring, _ranked(asked), strict=True):
        k = min(one.k, len(ranked))
        slots, behaviour, share = ranked[:k], "greedy", 1.0
        if explores:
            kept = max(k - partial, 0) if rule == "partial" else 0
            rest = ranked[kept:]
            order = torch.randperm(len(rest), generator=one.generator).tolist()
            slots = ranked[:kept] + [rest[i] for i in order[: k - kept]]
            behaviour, share = "partial" if rule == "partial" else "explore", kept / k
        chosen = torch.from_numpy(np.array(slots, dtype=np.int64))
        picked.append(Picked(chosen, behaviour, share))
    return picked


def _ranked(asked: Sequence[Ask]) -> list[list[int]]:
    """Return all slots of every lane, the best first: `best_slots`."""
    shuffled = [torch.randperm(len(one.scores), generator=one.generator) for one in asked]
    by_size: dict[int, list[int]] = {}
    for i, order in enumerate(shuffled):
        by_size.setdefault(len(order), []).append(i)
    ranked: list[list[int]] = [[]] * len(asked)
    for places in by_size.values():
        orders = torch.stack([shuffled[i] for i in places])  # [R, V]
        scores = torch.stack([asked[i].scores for i in places]).gather(1, orders)
        found = orders.gather(1, scores.argsort(dim=1, descending=True, stable=True)).tolist()
        for i, slots in zip(places, found, strict=True):
            ranked[i] = slots
    return ranked
