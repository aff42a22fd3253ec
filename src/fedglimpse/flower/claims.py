"""What a device says of itself is no bound: how far the operator lets it count.

`terms.max_examples` refuses a reply with more examples; `terms.max_share` clips what is left, so
that among three clients or more none has more of the weight of a round.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEWEST = 3  # clients: of two, one may well have most of the examples


def clipped(weights: Tensor, max_share: float) -> Tensor:
    """Return weights `[K]` of which none is more than `max_share` of their sum.

    Those that are too large become equal, the others stay. Where `max_share` is less than an equal
    share, all become equal.

    Args:
        weights: not negative.  # [K]
        max_share: 0 to 1.
    """
    count = len(weights)
    limit = max(max_share, 1 / max(count, 1))
    result = weights.double()
    total = float(result.sum())
    if count < FEWEST or not total > 0:
        return result
    is_clipped = torch.zeros(count, dtype=torch.bool)
    while True:
        is_over = ~is_clipped & (result > limit * result.sum() * (1 + 1e-9))
        if not is_over.any():
            return result
        is_clipped |= is_over
        num_clipped = int(is_clipped.sum())
        others = result[~is_clipped].sum()
        if limit * num_clipped >= 1 or not others > 0:
            return torch.full_like(result, total / count)
        result[is_clipped] = limit * others / (1 - limit * num_clipped)


def clipped_sizes(sizes: Tensor, max_share: float) -> Tensor:
    """Return numbers of examples `[K]`, int64, likewise; nobody's examples are clipped to none."""
    result = clipped(sizes, max_share).round().long()
    return torch.where(sizes > 0, result.clamp_min(1), sizes)
