"""What the Q-network reads: reports of the visible clients and sketches of past global models.

The paper's Secs. "Observation" and "Representing Temporal Context". Tensors have a first dimension
R for lanes: federations whose agents work side by side, each with its own networks and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedglimpse.agent.config import NUMBERS, SKETCHES
from fedglimpse.types import View

LARGEST = 1e6  # of a feature as it is reported
LIMIT = 10.0  # standardised values beyond this many deviations are cut


class Observation(NamedTuple):
    """B rounds of each of R lanes as their agents saw them, Eq. (observation)."""

    clients: Tensor  # [R, B, V, F] features, zero where padded
    ids: Tensor  # [R, B, V] client ids, zero where padded
    mask: Tensor  # [R, B, V] True for real clients
    history: Tensor  # [R, B, H+1, D] sketches of the global model, newest last
    history_mask: Tensor  # [R, B, H+1] True where the round exists


def features_of(views: Sequence[View], kind: str, standardise: bool) -> list[Tensor]:
    """Turn the reports in each view into one row of features per visible client `[V, F]`.

    Args:
        views: the glimpses of this round; sets of one size are worked on together.
        kind: `AgentConfig.input`.
        standardise: z-score every column within the visible set.
    """
    sizes = {view.num_visible for view in views}
    if len(sizes) > 1:
        return [features_of([view], kind, standardise)[0] for view in views]
    rows = finite(torch.stack([reported(view, kind) for view in views]))  # [R, V, F]
    return list(zscore(rows) if standardise else rows)


def reported(view: View, kind: str) -> Tensor:
    """Return the reports that an agent reads, unchanged `[V, F]`."""
    if kind in SKETCHES:
        return view.reports[SKETCHES[kind]].float()  # [V, D]
    columns = [view.reports[name].float() for name in NUMBERS[kind]]
    columns.append(view.sizes.float())
    return torch.stack(columns, dim=1)  # [V, 3] or [V, 4]


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


class History:
    """The last H+1 global sketches of every lane, Eq. (truncated_history).

    A run is shorter than H at its start; rounds that do not exist are masked. Rows this short are
    worked on as NumPy arrays: the same arithmetic, and a call costs a third.
    """

    def __init__(self, lanes: int, length: int, dim: int) -> None:
        """Start empty.

        Args:
            lanes: R.
            length: H, rounds before the current one.
            dim: D, floats of a sketch.
        """
        self._sketches = np.zeros((lanes, length + 1, dim), dtype=np.float32)  # newest last
        self._filled = np.zeros(lanes, dtype=np.int64)  # rounds that exist
        self._round = np.full(lanes, -1)  # number of the newest round

    def push(self, lane: int, sketch: Tensor, round_num: int) -> bool:
        """Add a round's sketch `[D]` of a lane; a second one of the same round replaces it.

        Returns:
            True for a round that was not there yet.
        """
        sketches = self._sketches[lane]
        is_new = round_num != self._round[lane] or self._filled[lane] == 0
        if is_new:
            sketches[:-1] = sketches[1:]
            self._filled[lane] = min(self._filled[lane] + 1, len(sketches))
            self._round[lane] = round_num
        sketches[-1] = sketch.numpy()
        return bool(is_new)

    def window(self) -> tuple[Tensor, Tensor]:
        """Return the sketches `[R, H+1, D]`, newest last, and which of them exist `[R, H+1]`.

        The next `push` changes the sketches that were returned.
        """
        length = self._sketches.shape[1]
        exists = np.arange(length) >= length - self._filled[:, None]
        return torch.from_numpy(self._sketches), torch.from_numpy(exists)

    def state_dict(self, lane: int) -> dict[str, Any]:
        """Return everything needed to resume a lane."""
        return {
            "sketches": torch.from_numpy(self._sketches[lane].copy()),
            "filled": int(self._filled[lane]),
            "round": int(self._round[lane]),
        }

    def load_state_dict(self, lane: int, state: dict[str, Any]) -> None:
        """Resume a lane from `state`."""
        self._sketches[lane] = state["sketches"].numpy()
        self._filled[lane] = state["filled"]
        self._round[lane] = state["round"]


class RunningScale:
    """Mean and spread of every sketch coordinate over the rounds of each lane (Welford)."""

    def __init__(self, lanes: int, dim: int) -> None:
        """Start with no round; sketches have `dim` floats."""
        self._count = np.zeros((lanes, 1))
        self._mean = np.zeros((lanes, dim))  # float64
        self._squares = np.zeros((lanes, dim))  # summed squared deviations
        self._numbers: tuple[Tensor, Tensor] | None = None  # computed once after every `add`

    def add(self, lane: int, sketch: Tensor) -> None:
        """Count one more sketch `[D]` of a lane."""
        values = sketch.numpy().astype(np.float64)
        self._count[lane] += 1
        deviation = values - self._mean[lane]
        self._mean[lane] += deviation / self._count[lane]
        self._squares[lane] += deviation * (values - self._mean[lane])
        self._numbers = None

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return the mean of each lane and one over its standard deviation `[R, D]`.

        A coordinate that never varied gets zero instead of infinity.
        """
        if self._numbers is None:
            spread = np.sqrt(self._squares / np.maximum(self._count, 1))
            factor = np.where(spread > 1e-12, 1.0 / np.maximum(spread, 1e-12), 0.0)
            mean32 = self._mean.astype(np.float32)
            factor32 = factor.astype(np.float32)
            self._numbers = torch.from_numpy(mean32), torch.from_numpy(factor32)
        return self._numbers

    def state_dict(self, lane: int) -> dict[str, Any]:
        """Return everything needed to resume a lane."""
        return {
            "count": int(self._count[lane, 0]),
            "mean": torch.from_numpy(self._mean[lane].copy()),
            "squares": torch.from_numpy(self._squares[lane].copy()),
        }

    def load_state_dict(self, lane: int, state: dict[str, Any]) -> None:
        """Resume a lane from `state`."""
        self._count[lane] = state["count"]
        self._mean[lane] = state["mean"].numpy()
        self._squares[lane] = state["squares"].numpy()
        self._numbers = None


def standardised(sketches: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
    """Standardise the global sketches of every lane `[R, n, D]`.

    Args:
        sketches: of global models.
        mean: of each lane.  # [R, D]
        factor: one over the standard deviation of each lane.  # [R, D]
    """
    deviation = (sketches - mean[:, None]) * factor[:, None]
    return deviation.clamp(-LIMIT, LIMIT)
