"""Q has to prove itself before it chooses.

A greedy choice by values that are noise is no random one: it takes the same clients again and
again. Where sets are drawn by lot, what Q said of a set can be held against what came of it:

    said    mean over the chosen of Q, standardised over the visible set
    came    change of the reward in that round
    z       atanh(c) * sqrt(n - 3), c their correlation over n drawn rounds, old ones fading
    trust   (z - 1) / 2 within [0, 1]

The agent explores with probability 1 - trust at least: by lot where Q knows nothing, as the
schedule has it once z reaches 3. What shows in a later round only is not seen.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

KEPT = 0.98  # share of the old sums in the new, a drawn round


class Proof:
    """How well Q told drawn sets apart."""

    def __init__(self) -> None:
        """Start without evidence."""
        self._last: float | None = None  # reward of the last round
        self._sums = [0.0] * 7  # of w, w^2, x, y, x^2, y^2, x*y with weights w

    def add(self, q: Tensor, chosen: Tensor, reward: float, drawn: bool) -> None:
        """Take in a round.

        Args:
            q: of the visible clients.  # [V]
            chosen: True for those whose updates were used.  # [V]
            reward: that came.
            drawn: whether the set was drawn by lot.
        """
        before, self._last = self._last, reward
        spread, count = float(q.std(correction=0)), int(chosen.sum())
        if not drawn or before is None or not 0 < count < len(q) or not spread > 0:
            return
        x, y = float((q[chosen].mean() - q.mean()) / spread), reward - before
        if math.isfinite(x) and math.isfinite(y):
            kept = [KEPT, KEPT**2, *[KEPT] * 5]
            new = [1.0, 1.0, x, y, x * x, y * y, x * y]
            self._sums = [k * old + n for k, old, n in zip(kept, self._sums, new, strict=True)]

    @property
    def trust(self) -> float:
        """From 0, Q is not known to mean anything, to 1."""
        weight, squares, x, y, xx, yy, xy = self._sums
        if not squares or (count := weight**2 / squares) <= 4:
            return 0.0
        x, y = x / weight, y / weight
        spreads = (xx / weight - x * x) * (yy / weight - y * y)
        if not spreads > 0:
            return 0.0
        c = (xy / weight - x * y) / math.sqrt(spreads)
        z = math.atanh(max(-1 + 1e-9, min(c, 1 - 1e-9))) * math.sqrt(count - 3)
        return max(0.0, min((z - 1) / 2, 1.0))

    def state_dict(self) -> dict[str, Any]:
        """The sums and the last reward."""
        return {"last": self._last, "sums": list(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._last, self._sums = state["last"], list(state["sums"])
