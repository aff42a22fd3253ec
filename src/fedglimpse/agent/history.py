"""The temporal context: sketches of the last global models, and their scale.

The paper feeds W_glob^{t-H}, ..., W_glob^{t} (Sec. "Representing Temporal Context"). A run is
shorter than H at its start; the missing rounds are masked, never filled with made-up zeros.

Rows this short are worked on as NumPy arrays: the same arithmetic, and a call costs a third.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Numbers(NamedTuple):
    """By what sketches are standardised, `[D]` each, or for several agents `[R, ..., D]`."""

    centre: Tensor  # mean over the rounds
    scale: Tensor  # one over the standard deviation


def standardised(history: Tensor, numbers: Numbers) -> Tensor:
    """Standardise a history `[..., H+1, D]`, newest last.

    Args:
        history: sketches of global models.
        numbers: of the run so far.
    """
    return ((history - numbers.centre) * numbers.scale).clamp(-LIMIT, LIMIT)


class RunningScale:
    """Spread of every sketch coordinate over the rounds of this run."""

    def __init__(self, dim: int) -> None:
        """Start with no round; sketches have `dim` floats."""
        self._count = 0
        self._mean = np.zeros(dim)  # float64
        self._squares = np.zeros(dim)  # summed squared deviations (Welford)
        self._numbers: Numbers | None = None  # worked out once after every `add`

    def add(self, sketch: Tensor) -> None:
        """Count one more sketch `[D]`."""
        wide = sketch.numpy().astype(np.float64)
        self._count += 1
        before = wide - self._mean
        self._mean += before / self._count
        self._squares += before * (wide - self._mean)
        self._numbers = None

    def numbers(self) -> Numbers:
        """Return what to subtract and to multiply by."""
        if self._numbers is None:
            spread = np.sqrt(self._squares / max(self._count, 1))
            found = self._mean, _inverse(spread)
            self._numbers = Numbers(*(torch.from_numpy(n.astype(np.float32)) for n in found))
        return self._numbers

    def __call__(self, history: Tensor) -> Tensor:
        """Standardise `[..., H+1, D]`; a coordinate that never varied becomes zero."""
        numbers = Numbers(*(number.to(history.device) for number in self.numbers()))
        return standardised(history, numbers)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""
        arrays = {name: getattr(self, f"_{name}") for name in self._KEPT}
        copies = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        return {"count": self._count, **copies}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._count = state["count"]
        for name in self._KEPT:
            setattr(self, f"_{name}", state[name].numpy().copy())
        self._numbers = None

    _KEPT = ("mean", "squares")


def _inverse(values: np.ndarray) -> np.ndarray:
    """Return one over each value, zero where it is zero."""
    return np.where(values > 1e-12, 1.0 / np.maximum(values, 1e-12), 0.0)
