"""The temporal context: sketches of the last global models, and their scale.

The paper feeds W_glob^{t-H}, ..., W_glob^{t} (Sec. "Representing Temporal Context"). A run is
shorter than H at its start; the missing rounds are masked, never filled with made-up zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LIMIT = 10.0  # standardised values beyond this many deviations are cut


class History:
    """The last H+1 global sketches, the current one included."""

    def __init__(self, length: int, dim: int) -> None:
        """Start empty.

        Args:
            length: H, rounds before the current one.
            dim: D, floats of a sketch.
        """
        self._sketches = torch.zeros(length + 1, dim)  # newest last
        self._filled = 0
        self._round = -1

    def push(self, sketch: Tensor, round_num: int) -> bool:
        """Add this round's sketch `[D]`; a second look at the same round replaces it.

        Returns:
            True for a round that was not there yet.
        """
        fresh = round_num != self._round or self._filled == 0
        if fresh:
            self._sketches = torch.roll(self._sketches, -1, dims=0)
            self._filled = min(self._filled + 1, len(self._sketches))
            self._round = round_num
        self._sketches[-1] = sketch
        return fresh

    def window(self) -> tuple[Tensor, Tensor]:
        """Return the sketches `[H+1, D]`, newest last, and which of them exist `[H+1]`."""
        length = len(self._sketches)
        return self._sketches, torch.arange(length) >= length - self._filled

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""
        return {"sketches": self._sketches.clone(), "filled": self._filled, "round": self._round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._sketches = state["sketches"].clone()
        self._filled, self._round = state["filled"], state["round"]


class RunningScale:
    """Mean and std of every sketch coordinate over the rounds of this run (Welford)."""

    def __init__(self, dim: int) -> None:
        self._count = 0
        self._mean = torch.zeros(dim, dtype=torch.float64)
        self._squares = torch.zeros(dim, dtype=torch.float64)  # summed squared deviations
        self._numbers: tuple[Tensor, Tensor] | None = None  # worked out once after every `add`

    def add(self, sketch: Tensor) -> None:
        """Count one more sketch `[D]`."""
        wide = sketch.double()
        self._count += 1
        before = wide - self._mean
        self._mean += before / self._count
        self._squares += before * (wide - self._mean)
        self._numbers = None

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return what to subtract and to multiply by, `[D]` each."""
        if self._numbers is None:
            std = (self._squares / max(self._count, 1)).sqrt()
            scale = torch.where(std > 1e-12, 1.0 / std.clamp_min(1e-12), 0.0).float()
            self._numbers = self._mean.float(), scale
        return self._numbers

    def __call__(self, sketches: Tensor) -> Tensor:
        """Standardise `[..., D]`; a coordinate that never varied becomes zero."""
        centre, scale = (number.to(sketches.device) for number in self.numbers())
        return ((sketches - centre) * scale).clamp(-LIMIT, LIMIT)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""
        return {
            "count": self._count,
            "mean": self._mean.clone(),
            "squares": self._squares.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._count = state["count"]
        self._mean, self._squares = state["mean"].clone(), state["squares"].clone()
        self._numbers = None
