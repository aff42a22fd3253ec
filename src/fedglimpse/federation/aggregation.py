"""Merging client updates into the next global model: plain arithmetic on flat states.

The simulator and a real server use the same objects. See the paper's Eq. (Agg) and (tempAgg).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedglimpse.errors import UserError
from fedglimpse.types import Aggregator, Update

Source = Literal["raw", "smoothed"]


def weighted_delta(state: Tensor, update: Update) -> Tensor:
    """Return `state` plus the weighted client deltas.

    Weights on parameters are used as they are (they need not sum to one). Buffers are running
    statistics, so they are averaged with normalised weights: a variance can never go below zero.

    Args:
        state: of one lane, or of several side by side.  # [d] or [R, d]
        update: of as many clients in every lane: weights `[..., K]`, deltas `[..., K, d]`.
    """
    weights = update.weights
    total = weights.sum(-1, keepdim=True)
    num_clients = max(weights.shape[-1], 1)
    equal_shares = torch.full_like(weights, 1 / num_clients)
    shares = torch.where(
        total > 0,
        weights / total.clamp(min=1e-30),
        equal_shares,
    )
    parameters = update.deltas[..., : update.num_params]
    buffers = update.deltas[..., update.num_params :]
    parameter_change = weights.unsqueeze(-2) @ parameters  # [..., 1, num_params]
    buffer_change = shares.unsqueeze(-2) @ buffers  # [..., 1, d - num_params]
    change = torch.cat([parameter_change, buffer_change], dim=-1)
    return state + change.squeeze(-2)


class WeightedDelta:
    """FedAvg's aggregation, Eq. (Agg); and the defaults that other aggregators build on."""

    needs: frozenset[str] = frozenset()
    applied: Tensor | None = None

    def starts(self, state: Tensor, ids: Tensor) -> Tensor:
        """Return the global state, for every client."""
        return state.expand(len(ids), -1)

    step = staticmethod(weighted_delta)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the aggregation has no memory."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, as `state` is empty."""


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
                "5 or 6 as in the paper.",
                key="aggregate.window",
            )
        if source not in ("raw", "smoothed"):
            raise UserError(
                f"aggregate.source={source!r} is unknown: use 'raw' or 'smoothed'.",
                key="aggregate.source",
            )
        self.window = window
        self.source = source
        self.past: deque[Tensor] = deque(maxlen=window - 1)

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        aggregate = weighted_delta(state, update)
        return average_over_time([self], state[None], aggregate[None])[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the models still in the window."""
        # Copies, since each may be a row of a table that holds all lanes.
        return {"past": [model.clone() for model in self.past]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the models of `state`."""
        self.past = deque(state["past"], maxlen=self.window - 1)


def average_over_time(
    lanes: Sequence[TemporalWindow], states: Tensor, aggregates: Tensor
) -> Tensor:
    """Return the next global states `[R, d]`, and remember what later rounds average with.

    Args:
        lanes: windows that hold the same number of models.
        states: the global models before this round.  # [R, d]
        aggregates: of this round.  # [R, d]
    """
    models: list[Tensor] = []
    for lane, state, aggregate in zip(lanes, states, aggregates, strict=True):
        if lane.source == "smoothed":
            lane.past.append(state)  # W^t, averaged already
            models += [aggregate, *lane.past]
        else:
            models += [aggregate, *lane.past]
            lane.past.append(aggregate)
    windows = torch.stack(models).unflatten(0, (len(states), -1))  # [R, window, d]
    return windows.mean(1)


def batch_key(aggregator: Aggregator) -> Hashable | None:
    """Return what is equal for aggregators of lanes that can step in one pass.

    None where there is no such pass: a class built on these may step as it likes.
    """
    if type(aggregator) is WeightedDelta:
        return WeightedDelta
    if type(aggregator) is TemporalWindow:
        return aggregator.window, aggregator.source, len(aggregator.past)
    return None


def step_lanes(aggregators: Sequence[Aggregator], states: Tensor, update: Update) -> Tensor:
    """Step aggregators with the same `batch_key` in one pass; returns the next states `[R, d]`.

    Args:
        aggregators: of R lanes.
        states: global states, which the aggregators may keep.  # [R, d]
        update: of as many clients in every lane: weights `[R, K]`, deltas `[R, K, d]`.
    """
    aggregates = weighted_delta(states, update)  # [R, d]
    windows = [one for one in aggregators if isinstance(one, TemporalWindow)]
    if not windows:  # the key is the same for all: all are windows, or none is
        return aggregates
    return average_over_time(windows, states, aggregates)
