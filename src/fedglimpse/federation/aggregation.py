"""Merging client updates into the next global model: plain arithmetic on flat states.

The simulator and a real server use the same objects. See the paper's Eq. (Agg) and (tempAgg).
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import torch
from torch import Tensor

from fedglimpse.errors import UserError
from fedglimpse.types import Update

Source = Literal["raw", "smoothed"]


def weighted_delta(state: Tensor, update: Update) -> Tensor:
    """Return `state` plus the weighted client deltas `[d]`.

    Weights on parameters are used as they are (they need not sum to one). Buffers are running
    statistics, so they are averaged with normalised weights: a variance can never go below zero.
    """
    weights, deltas, cut = update.weights, update.deltas, update.num_params
    total = weights.sum()
    even = torch.full_like(weights, 1 / max(len(weights), 1))
    convex = torch.where(total > 0, weights / total.clamp(min=1e-30), even)
    return state + torch.cat([weights @ deltas[:, :cut], convex @ deltas[:, cut:]])


class WeightedDelta:
    """FedAvg's aggregation, Eq. (Agg); and the defaults that other aggregators build on."""

    needs: frozenset[str] = frozenset()
    applied: Tensor | None = None

    def starts(self, state: Tensor, ids: Tensor) -> Tensor:
        """Every client trains from the global state."""
        return state.expand(len(ids), -1)

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        return weighted_delta(state, update)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class TemporalWindow(WeightedDelta):
    """The paper's temporal parameter aggregation, in both of its forms.

    `smoothed`, Eq. (tempAgg): mean of the new aggregate and the previous `window - 1` global
    models, which are averages themselves; the initial model counts.
    `raw`, the authors' release: mean of the last `window` raw aggregates.
    While fewer models than `window` exist, the mean is over those that do.
    """

    def __init__(self, window: int, source: Source) -> None:
        """Average over `window` models; 1 means no averaging."""
        if window < 1:
            raise UserError(
                f"aggregate.window={window} is not a number of models: use 1 for no averaging, "
                "5 or 6 as in the paper."
            )
        if source not in ("raw", "smoothed"):
            raise UserError(f"aggregate.source={source!r} is unknown: use 'raw' or 'smoothed'.")
        self.window, self.source = window, source
        self.past: deque[Tensor] = deque(maxlen=window - 1)

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        fresh = weighted_delta(state, update)
        if self.source == "smoothed":
            self.past.append(state)  # W^t, averaged already
            return torch.stack([fresh, *self.past]).mean(0)
        mean = torch.stack([fresh, *self.past]).mean(0)
        self.past.append(fresh)
        return mean

    def state_dict(self) -> dict[str, Any]:
        """The models still in the window."""
        return {"past": [model.clone() for model in self.past]}  # not with the rows beside it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the models of `state`."""
        self.past = deque(state["past"], maxlen=self.window - 1)
