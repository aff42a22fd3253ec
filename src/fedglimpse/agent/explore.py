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


def pick(
    scores: Tensor,
    k: int,
    eps: float,
    rule: str,
    partial: int,
    generator: torch.Generator,
) -> Picked:
    """Choose min(k, V) slots by score, or with probability `eps` at random: Algorithm 1, 9-12.

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
    shuffled = torch.randperm(len(scores), generator=generator)  # so ties do not fall by index
    ranked = shuffled[scores[shuffled].argsort(descending=True, stable=True)]
    if not exploring:
        return Picked(ranked[:k], "greedy", 1.0)
    greedy_count = max(k - partial, 0) if rule == "partial" else 0
    candidates = ranked[greedy_count:]
    order = torch.randperm(len(candidates), generator=generator)
    drawn = candidates[order[: k - greedy_count]]
    behaviour = "partial" if rule == "partial" else "explore"
    return Picked(torch.cat([ranked[:greedy_count], drawn]), behaviour, greedy_count / k)
