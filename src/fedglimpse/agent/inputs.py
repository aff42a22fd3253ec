"""What the Q-network reads: tensors of a visible set, padded so that rounds can be stacked."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedglimpse.agent.config import NUMBERS, SKETCHES
from fedglimpse.types import View

LARGEST = 1e6  # of a feature as it is reported


class Observation(NamedTuple):
    """B rounds as the agent saw them (paper Sec. IV-D: client sketches, ids, global history)."""

    clients: Tensor  # [B, V, F] features, zero where padded
    ids: Tensor  # [B, V] client ids, zero where padded
    mask: Tensor  # [B, V] True for real clients
    history: Tensor  # [B, H+1, D] sketches of the global model, newest last
    history_mask: Tensor  # [B, H+1] True where the round exists

    def to(self, device: torch.device) -> Observation:
        """Copy to `device`; free where it is already there."""
        return Observation(*(tensor.to(device) for tensor in self))


def client_features(view: View, kind: str, standardise: bool) -> Tensor:
    """Turn a view's reports into one row of features per visible client `[V, F]`.

    Args:
        view: the glimpse of this round.
        kind: `AgentConfig.input`.
        standardise: z-score every column within the visible set.
    """
    return clean(reported(view, kind), standardise)


def reported(view: View, kind: str) -> Tensor:
    """Return what an agent reads of the reports of visible clients, as it is `[V, F]`."""
    if kind in SKETCHES:
        return view.reports[SKETCHES[kind]].float()  # [V, D]
    columns = [*(view.reports[name] for name in NUMBERS[kind]), view.sizes]
    return torch.stack([column.float() for column in columns], dim=1)  # [V, 3] or [V, 4]


def clean(rows: Tensor, standardise: bool) -> Tensor:
    """Make features `[..., V, F]` of reports; visible sets of one size can be stacked."""
    rows = finite(rows)
    return zscore(rows) if standardise else rows


def finite(values: Tensor) -> Tensor:
    """Replace by zero what no model that learns reports: NaN, infinity, and beyond `LARGEST`.

    A client that diverged must not spoil the others.
    """
    return torch.where(values.abs() <= LARGEST, values, 0.0)


def zscore(rows: Tensor) -> Tensor:
    """Standardise columns of `[..., V, F]` with the population std; a constant one becomes zero.

    Computed in float64: equal values must give exactly zero, not amplified rounding.
    """
    wide = rows.double()
    centred = wide - wide.mean(dim=-2, keepdim=True)
    std = centred.square().mean(dim=-2, keepdim=True).sqrt()
    varies = wide.amax(dim=-2, keepdim=True) > wide.amin(dim=-2, keepdim=True)
    return torch.where(varies, centred / std.clamp_min(1e-30), 0.0).float()
