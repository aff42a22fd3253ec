"""Clients that were chosen seldom get a start where Q cannot tell clients apart.

Top-K of scores that differ by noise alone takes the same clients again and again, and what the
others hold is never learnt. So a turn is added to Q, weighted by the noise in Q:

    turn    (mean - n) / sqrt(mean + 1) within [-1, 1], n the times a client was chosen and the mean
            over the visible set
    weight  c * e * min(1, e / s), e the root mean squared TD error and s the spread of Q

Where clients differ clearly (s well above e) the weight vanishes and Q decides alone.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

KEPT = 0.9  # share of the old value in the running TD error


class Turns:
    """Counts whose turn it is, and how far Q can be trusted."""

    def __init__(self, weight: float, loss: str) -> None:
        """Start with nobody chosen.

        Args:
            weight: c; 0 leaves Q as it is.
            loss: "mse" or "smooth_l1", what a TD loss is the mean of.
        """
        self.weight, self._squares = weight, 1.0 if loss == "mse" else 2.0
        self.times: Counter[int] = Counter()  # that each client was chosen
        self.error: float | None = None  # mean squared TD error, None before the first lesson

    def scores(self, q: Tensor, ids: Tensor) -> Tensor:
        """Return Q with turns `[V]`.

        Args:
            q: of the visible clients.  # [V]
            ids: of the same.  # [V]
        """
        if not self.weight or self.error is None:
            return q
        times = [self.times[i] for i in ids.tolist()]
        mean, error = sum(times) / len(times), math.sqrt(self.error)
        weight = self.weight * error * min(1.0, error / max(float(q.std(correction=0)), 1e-12))
        turns = [(mean - own) / math.sqrt(mean + 1) for own in times]
        return q + torch.tensor([weight * max(-1.0, min(turn, 1.0)) for turn in turns])

    def chosen(self, ids: Tensor) -> None:
        """Count the clients whose updates were used `[K]`."""
        self.times.update(ids.tolist())

    def learnt(self, td_loss: float) -> None:
        """Take in the TD loss of a round's mini-batches."""
        new = self._squares * td_loss
        self.error = new if self.error is None else KEPT * self.error + (1 - KEPT) * new

    def state_dict(self) -> dict[str, Any]:
        """Who was chosen how often, and the running error."""
        return {"times": dict(self.times), "error": self.error}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.times, self.error = Counter(state["times"]), state["error"]
