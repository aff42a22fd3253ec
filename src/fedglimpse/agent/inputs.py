"""What the Q-network reads: reports of the visible clients and sketches of past global models.

See Hou et al., sections "Observation" and "Representing Temporal Context". Tensors have a first
dimension R for lanes: federations whose agents work side by side, each with its own networks and
memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedglimpse.agent.config import NUMBERS, SKETCHES
from fedglimpse.types import View

LARGEST = 1e6  # reported features beyond it come from a model that has diverged
LIMIT = 10.0  # standardised values are clipped at so many deviations
SMALLEST_DEVIATION = 1e-30  # features that vary less are divided by this, which stays finite
CONSTANT = 1e-12  # coordinates of sketches that vary less count as constant


class Observation(NamedTuple):
    """B rounds of each of R lanes as their agents saw them, Eq. (observation)."""

    clients: Tensor  # [R, B, V, F] features, zero where padded
    ids: Tensor  # [R, B, V] client ids, zero where padded
    mask: Tensor  # [R, B, V] True for real clients
    history: Tensor  # [R, B, H+1, D] sketches of the global model, newest last
    history_mask: Tensor  # [R, B, H+1] True where the round exists


def features_of(view: View, kind: str, standardise: bool) -> Tensor:
    """Turn the reports in a view into one row of features per visible client `[V, F]`.

    Args:
        view: what the server sees of this round.
        kind: `AgentConfig.input`.
        standardise: z-score every column within the visible set.
    """
    if kind in SKETCHES:
        rows = view.reports[SKETCHES[kind]].float()  # [V, D]
    else:
        names = NUMBERS[kind]
        columns = [view.reports[name].float() for name in names]
        columns.append(view.sizes.float())
        rows = torch.stack(columns, dim=1)  # [V, 3] or [V, 4]
    rows = finite(rows)
    return zscore(rows) if standardise else rows


def finite(values: Tensor) -> Tensor:
    """Replace NaN, infinity and values beyond `LARGEST` by zero.

    Only a client whose model has diverged reports them, and it must not spoil the others.
    """
    is_plausible = values.abs() <= LARGEST  # false for NaN
    return torch.where(is_plausible, values, 0.0)


def zscore(rows: Tensor) -> Tensor:
    """Standardise columns of `[V, F]` with the population std; a constant one becomes zero.

    Computed in float64: equal values must give exactly zero, not amplified rounding.
    """
    wide = rows.double()
    centred = wide - wide.mean(dim=0)
    variance = centred.square().mean(dim=0)  # [F]
    deviation = variance.sqrt()
    largest = wide.amax(dim=0)
    smallest = wide.amin(dim=0)
    varies = largest > smallest  # [F]
    standardised_rows = centred / deviation.clamp_min(SMALLEST_DEVIATION)
    return torch.where(varies, standardised_rows, 0.0).float()


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
        self.sketches = torch.zeros(lanes, length + 1, dim)  # newest last; `push` changes them
        self.exists = torch.zeros(lanes, length + 1, dtype=torch.bool)  # rounds that exist
        self._sketches = self.sketches.numpy()  # the same memory
        self._exists = self.exists.numpy()
        self._round = np.full(lanes, -1)  # number of the newest round

    def push(self, lane: int, sketch: Tensor, round_num: int) -> bool:
        """Add a round's sketch `[D]` of a lane; a second one of the same round replaces it.

        Returns:
            True for a round that was not there yet.
        """
        sketches = self._sketches[lane]  # [H+1, D]
        exists = self._exists[lane]  # [H+1]
        is_new = round_num != self._round[lane] or not exists[-1]
        if is_new:
            sketches[:-1] = sketches[1:]
            exists[:-1] = exists[1:]
            exists[-1] = True
            self._round[lane] = round_num
        sketches[-1] = sketch.numpy()
        return bool(is_new)

    def state_dict(self, lane: int) -> dict[str, Any]:
        """Return everything needed to resume a lane."""
        return {
            "sketches": self.sketches[lane].clone(),
            "filled": int(self._exists[lane].sum()),
            "round": int(self._round[lane]),
        }

    def load_state_dict(self, lane: int, state: dict[str, Any]) -> None:
        """Resume a lane from `state`."""
        length = self.sketches.shape[1]
        self.sketches[lane] = state["sketches"]
        num_missing = length - state["filled"]
        self._exists[lane] = np.arange(length) >= num_missing
        self._round[lane] = state["round"]


class RunningScale:
    """Mean and spread of every sketch coordinate over the rounds of each lane (Welford)."""

    def __init__(self, lanes: int, dim: int) -> None:
        """Start with no round; sketches have `dim` floats."""
        self._count = np.zeros((lanes, 1))
        self._mean = np.zeros((lanes, dim))  # float64
        self._squares = np.zeros((lanes, dim))  # summed squared deviations

    def add(self, lane: int, sketch: Tensor) -> None:
        """Count one more sketch `[D]` of a lane."""
        values = sketch.numpy().astype(np.float64)
        self._count[lane] += 1
        deviation = values - self._mean[lane]
        self._mean[lane] += deviation / self._count[lane]
        deviation_after = values - self._mean[lane]
        self._squares[lane] += deviation * deviation_after

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return the mean of each lane and one over its standard deviation `[R, D]`.

        A coordinate that never varied gets zero instead of infinity.
        """
        count = np.maximum(self._count, 1)
        variance = self._squares / count
        deviation = np.sqrt(variance)
        inverse = 1.0 / np.maximum(deviation, CONSTANT)
        factor = np.where(deviation > CONSTANT, inverse, 0.0)
        mean32 = self._mean.astype(np.float32)
        factor32 = factor.astype(np.float32)
        return torch.from_numpy(mean32), torch.from_numpy(factor32)

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


def standardised(sketches: Tensor, mean: Tensor, factor: Tensor) -> Tensor:
    """Standardise the global sketches of every lane `[R, n, D]`.

    Args:
        sketches: of global models.
        mean: of each lane.  # [R, D]
        factor: one over the standard deviation of each lane.  # [R, D]
    """
    distance = sketches - mean.unsqueeze(1)
    deviations = distance * factor.unsqueeze(1)
    return deviations.clamp(-LIMIT, LIMIT)
