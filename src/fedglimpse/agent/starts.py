"""Some clients get a start where Q cannot tell clients apart.

Top-K of scores that differ by noise alone takes the same clients again and again, and what the
others hold is never learnt. So a start is added to Q, weighted by the noise in Q:

    turn    (mean - n) / sqrt(mean + 1) within [-1, 1], n the times a client was chosen and the mean
            over the visible set
    lean    the loss of the global model at a client, standardised over the visible set
    weight  e * min(1, e / s), e the root mean squared TD error and s the spread of Q
    start   weight * (c_turn * turn + c_lean * lean)

Where clients differ clearly (s well above e) the weight vanishes and Q decides alone. Where the
agent explores, sets are drawn in proportion to exp(c_lean * lean): evenly where c_lean is 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedglimpse.agent.inputs import finite, zscore

KEPT = 0.9  # share of the old value in the running TD error


class Starts:
    """Knows whose turn it is, whom the model fits badly, and how far Q can be trusted."""

    def __init__(self, turns: float, lean: float, loss: str) -> None:
        """Start with nobody chosen.

        Args:
            turns: c_turn; where it and `lean` are 0, Q is left as it is.
            lean: c_lean.
            loss: "mse" or "smooth_l1", what a TD loss is the mean of.
        """
        self.turns, self.loss_lean, self._squares = turns, lean, 1.0 if loss == "mse" else 2.0
        self.times: Counter[int] = Counter()  # that each client was chosen
        self.error: float | None = None  # mean squared TD error, None before the first lesson

    def lean(self, losses: Tensor | None) -> Tensor | None:
        """Return c_lean * lean of losses `[V]`; None where it is not asked for."""
        if not self.loss_lean or losses is None:
            return None
        return self.loss_lean * zscore(finite(losses.float())[:, None])[:, 0]

    def scores(self, q: Tensor, ids: Tensor, lean: Tensor | None = None) -> Tensor:
        """Return Q with starts `[V]`.

        Args:
            q: of the visible clients.  # [V]
            ids: of the same.  # [V]
            lean: of the same, see there.  # [V]
        """
        if self.error is None or not (self.turns or lean is not None):
            return q
        error = math.sqrt(self.error)
        weight = error * min(1.0, error / max(float(q.std(correction=0)), 1e-12))
        if self.turns:
            q = q + torch.tensor([weight * self.turns * turn for turn in self._turns(ids.tolist())])
        return q if lean is None else q + weight * lean

    def _turns(self, ids: Sequence[int]) -> list[float]:
        """Return the turn of each visible client."""
        times = [self.times[i] for i in ids]
        mean = sum(times) / len(times)
        return [max(-1.0, min((mean - own) / math.sqrt(mean + 1), 1.0)) for own in times]

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
