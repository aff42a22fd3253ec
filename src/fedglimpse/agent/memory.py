"""Rounds the agent remembers, in preallocated tensors: Algorithm 2, lines 1 and 3.

One row per round. What several transitions share is not stored twice: the history window and the
n-step return (Eq. multistep_target) are gathered from single rows at the moment of sampling.
Single rows are written as NumPy arrays on the tensors' memory, where a call costs a third.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.learner import Batch


class Round(NamedTuple):
    """One finished round."""

    clients: Tensor  # [V, F] features of the visible clients
    ids: Tensor  # [V]
    chosen: Tensor  # [V] True where the client's update was used
    sketch: Tensor  # [D] of the global model the round began with
    reward: Tensor  # [R] one reward, or one per class
    histogram: Tensor  # [C] proxy predictions of the global model; NaN where unknown
    round_num: int
    k: int  # budget of the choice


class Replay:
    """A ring of rounds from which n-step transitions are drawn."""

    def __init__(
        self,
        capacity: int,
        *,
        features: int,
        sketch_dim: int,
        rewards: int,
        num_classes: int,
        history: int,
        n_step: int,
        gamma: float,
        max_visible: int = 16,
    ) -> None:
        """Allocate.

        Args:
            capacity: rounds that are kept.
            features: F.
            sketch_dim: D.
            rewards: R, 1 or C.
            num_classes: C.
            history: H, rounds before a transition that its observation shows.
            n_step: rounds between an observation and the one it bootstraps from.
            gamma: discount.
            max_visible: V to begin with; doubles when a larger set arrives.
        """
        self.capacity, self.history, self.n_step = capacity, history, n_step
        self.gamma = gamma
        self.count = 0  # rounds ever added; entry number e lies in row e % capacity
        numbers, flags = torch.int64, torch.bool
        self.rows: dict[str, Tensor] = {
            "clients": torch.zeros(capacity, max_visible, features),
            "ids": torch.zeros(capacity, max_visible, dtype=numbers),
            "mask": torch.zeros(capacity, max_visible, dtype=flags),
            "chosen": torch.zeros(capacity, max_visible, dtype=flags),
            "sketch": torch.zeros(capacity, sketch_dim),
            "reward": torch.zeros(capacity, rewards),
            "histogram": torch.full((capacity, num_classes), torch.nan),
            "k": torch.zeros(capacity, dtype=numbers),
            "round_num": torch.zeros(capacity, dtype=numbers),
            "visible": torch.zeros(capacity, dtype=numbers),
        }
        self.arrays = {name: rows.numpy() for name, rows in self.rows.items()}  # the same memory
        self.changes = 0  # times that rows were moved or replaced, other than by `add`

    @property
    def oldest(self) -> int:
        """Entry number of the oldest round still there."""
        return max(self.count - self.capacity, 0)

    def add(self, item: Round) -> None:
        """Store a round over the oldest one."""
        visible, row = len(item.ids), self.count % self.capacity
        while visible > self.width:
            self._widen()
        rows = self.arrays
        for name in ("clients", "ids", "chosen"):
            rows[name][row, :visible] = getattr(item, name).numpy()
            rows[name][row, visible:] = 0
        rows["mask"][row, :visible] = True
        rows["mask"][row, visible:] = False
        for name in ("sketch", "reward", "histogram"):
            rows[name][row] = getattr(item, name).numpy()
        for name, number in (("round_num", item.round_num), ("k", item.k), ("visible", visible)):
            rows[name][row] = number
        self.count += 1

    def starts(self) -> Tensor:
        """Entry numbers of the transitions that can be sampled, oldest first.

        Entry t needs entry t + n to exist, and a choice that was carried out.
        """
        entries = np.arange(self.oldest, max(self.count - self.n_step, self.oldest), dtype=np.int64)
        rows = entries % self.capacity
        keep = self.arrays["chosen"][rows].any(axis=1)
        return torch.from_numpy(entries[keep])

    def most_visible(self, entries: Tensor, ahead: int = 0) -> int:
        """Return the size of the largest visible set so many rounds after these entry numbers."""
        return int(self.arrays["visible"][(entries.numpy() + ahead) % self.capacity].max())

    def sample(self, size: int, generator: torch.Generator) -> Batch:
        """Draw up to `size` different transitions."""
        starts = self.starts()
        return self.gather(starts[torch.randperm(len(starts), generator=generator)[:size]])

    def gather(self, entries: Tensor) -> Batch:
        """Build the transitions that begin at the given entry numbers `[B]`."""
        rows, n = entries % self.capacity, self.n_step
        ahead = torch.arange(n)
        powers = self.gamma ** ahead.float()  # [n]
        steps = (entries[:, None] + ahead) % self.capacity  # [B, n]
        returns = (self.rows["reward"][steps] * powers[:, None]).sum(dim=1)  # [B, R]
        obs, after = self._observe(entries), self._observe(entries + n)
        return Batch(
            obs=obs,
            chosen=self.rows["chosen"][rows][:, : obs.mask.shape[1]],
            returns=returns.squeeze(1),
            discount=torch.full((len(entries),), self.gamma**n),
            next_obs=after,
            next_k=self.rows["k"][(entries + n) % self.capacity],
            histogram=self.rows["histogram"][rows],
        )

    def _observe(self, entries: Tensor) -> Observation:
        rows = entries % self.capacity
        mask = self.rows["mask"][rows]
        width = int(mask.sum(dim=1).max())  # no wider than this batch needs
        back = torch.arange(-self.history, 1)
        window = entries[:, None] + back  # [B, H+1] entry numbers
        return Observation(
            clients=self.rows["clients"][rows, :width],
            ids=self.rows["ids"][rows, :width],
            mask=mask[:, :width],
            history=self.rows["sketch"][window % self.capacity],
            history_mask=window >= self.oldest,
        )

    @property
    def width(self) -> int:
        """Room for visible clients in a row."""
        return self.rows["ids"].shape[1]

    def _widen(self) -> None:
        """Double the room for visible clients."""
        self.changes += 1
        for name in ("clients", "ids", "mask", "chosen"):
            old = self.rows[name]
            self.rows[name] = torch.cat([old, torch.zeros_like(old)], dim=1)
            self.arrays[name] = self.rows[name].numpy()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue; only rows in use."""
        used = min(self.count, self.capacity)
        return {
            "count": self.count,
            "rows": {name: rows[:used].clone() for name, rows in self.rows.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        while self.width < state["rows"]["ids"].shape[1]:
            self._widen()
        self.count, self.changes = state["count"], self.changes + 1
        for name, saved in state["rows"].items():
            room = self.rows[name]
            room.zero_()
            room[(slice(0, len(saved)), *map(slice, saved.shape[1:]))] = saved
