"""The temporal context: sketches of the last global models, and their scale.

The paper feeds W_glob^{t-H}, ..., W_glob^{t} (Sec. "Representing Temporal Context"). A run is
shorter than H at its start; the missing rounds are masked, never filled with made-up zeros.

Rows this short are worked on as NumPy arrays: the same arithmetic, and a call costs a third.
"""

from __future__ import annotations

from typing import Any

import numpy as np
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
        self._sketches = np.zeros((length + 1, dim), dtype=np.float32)  # newest last
        self._exist = torch.zeros(length + 1, dtype=torch.bool)
        self._filled = 0
        self._round = -1

    def push(self, sketch: Tensor, round_num: int) -> bool:
        """Add this round's sketch `[D]`; a second look at the same round replaces it.

        Returns:
            True for a round that was not there yet.
        """
        fresh = round_num != self._round or self._filled == 0
        if fresh:
            self._sketches[:-1] = self._sketches[1:]
            self._fill(min(self._filled + 1, len(self._sketches)))
            self._round = round_num
        self._sketches[-1] = sketch.numpy()
        return fresh

    def _fill(self, rounds: int) -> None:
        """Note how many of the sketches exist."""
        if rounds != self._filled:
            length = len(self._sketches)
            self._filled, self._exist = rounds, torch.arange(length) >= length - rounds

    def window(self) -> tuple[Tensor, Tensor]:
        """Return the sketches `[H+1, D]`, newest last, and which of them exist `[H+1]`.

        The sketches are those of now: the next `push` changes them.
        """
        return torch.from_numpy(self._sketches), self._exist

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""
        sketches = torch.from_numpy(self._sketches.copy())
        return {"sketches": sketches, "filled": self._filled, "round": self._round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._sketches = state["sketches"].numpy().copy()
        self._fill(state["filled"])
        self._round = state["round"]


class RunningScale:
    """Mean and std of every sketch coordinate over the rounds of this run (Welford)."""

    def __init__(self, dim: int) -> None:
        self._count = 0
        self._mean = np.zeros(dim)  # float64
        self._squares = np.zeros(dim)  # summed squared deviations
        self._numbers: tuple[Tensor, Tensor] | None = None  # worked out once after every `add`

    def add(self, sketch: Tensor) -> None:
        """Count one more sketch `[D]`."""
        wide = sketch.numpy().astype(np.float64)
        self._count += 1
        before = wide - self._mean
        self._mean += before / self._count
        self._squares += before * (wide - self._mean)
        self._numbers = None

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return what to subtract and to multiply by, `[D]` each."""
        if self._numbers is None:
            std = np.sqrt(self._squares / max(self._count, 1))
            scale = np.where(std > 1e-12, 1.0 / np.maximum(std, 1e-12), 0.0)
            centre, scale = self._mean.astype(np.float32), scale.astype(np.float32)
            self._numbers = torch.from_numpy(centre), torch.from_numpy(scale)
        return self._numbers

    def __call__(self, sketches: Tensor) -> Tensor:
        """Standardise `[..., D]`; a coordinate that never varied becomes zero."""
        centre, scale = (number.to(sketches.device) for number in self.numbers())
        return ((sketches - centre) * scale).clamp(-LIMIT, LIMIT)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""
        return {
            "count": self._count,
            "mean": torch.from_numpy(self._mean.copy()),
            "squares": torch.from_numpy(self._squares.copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._count = state["count"]
        self._mean, self._squares = (state[name].numpy().copy() for name in ("mean", "squares"))
        self._numbers = None
