"""When and how the agent explores: the paper's epsilon-greedy rule and the release's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
