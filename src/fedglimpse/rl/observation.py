"""What the Q-network reads: tensors of a visible set, padded so that rounds can be stacked."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.types import View


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

    def widened(self, slots: int) -> Observation:
        """Pad to a larger number of slots."""
        more = slots - self.mask.shape[1]
        return self._replace(
            clients=F.pad(self.clients, (0, 0, 0, more)),
            ids=F.pad(self.ids, (0, more)),
            mask=F.pad(self.mask, (0, more)),
        )


def client_features(view: View, kind: str, standardise: bool) -> Tensor:
    """Turn a view's reports into one row of features per visible client `[V, F]`.

    Args:
        view: the glimpse of this round.
        kind: `AgentConfig.input`.
        standardise: z-score every column within the visible set.
    """
    if kind == "scalar":
        columns = [view.reports["update_norm"], view.reports["train_loss"], view.sizes]
        rows = torch.stack([column.float() for column in columns], dim=1)  # [V, 3]
    else:
        rows = view.reports["delta_sketch" if kind == "grad" else "sketch"].float()  # [V, D]
    rows = finite(rows)
    return zscore(rows) if standardise else rows


def finite(values: Tensor) -> Tensor:
    """Replace NaN and infinity by zero: a client that diverged must not spoil the others."""
    return torch.where(values.isfinite(), values, 0.0)


def zscore(rows: Tensor) -> Tensor:
    """Standardise columns with the population std; a constant column becomes zero.

    Computed in float64: equal values must give exactly zero, not amplified rounding.
    """
    wide = rows.double()
    centred = wide - wide.mean(dim=0)
    std = centred.square().mean(dim=0).sqrt()
    varies = wide.amax(dim=0) > wide.amin(dim=0)
    return torch.where(varies, centred / std.clamp_min(1e-30), 0.0).float()
