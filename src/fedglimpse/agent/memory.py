"""Rounds that the agents of R lanes remember: Algorithm 2, lines 1 and 3.

One row per round, in tensors `[R, capacity, ...]` where the networks live. What several transitions
share is not stored twice: the history window and the n-step return (Eq. multistep_target) are
gathered from single rows at the moment of sampling. What decides which rounds can be sampled is
kept as NumPy arrays, so that a GPU is never waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.agent.config import AgentConfig, AgentSizes
from fedglimpse.agent.inputs import Observation

FIRST_WIDTH = 16  # visible clients that a row has room for at first
_BY_SLOT = ("clients", "ids", "mask", "chosen")  # rows with one entry for each visible client


class Round(NamedTuple):
    """One finished round of a lane."""

    round_num: int
    clients: Tensor  # [V, F] features of the visible clients
    ids: Tensor  # [V]
    chosen: Tensor  # [V] True where the client's update was used
    sketch: Tensor  # [D] of the global model the round began with
    reward: Tensor  # [1], or one per class [C]
    histogram: Tensor  # [C] proxy predictions of the global model; NaN where unknown
    k: int  # budget of the choice


class NStepBatch(NamedTuple):
    """B transitions of n steps of each of R lanes, but for what they lead to."""

    obs: Observation  # [R, B, ...]
    chosen: Tensor  # [R, B, V] True for the chosen clients
    returns: Tensor  # [R, B, 1 or C] discounted rewards of the n steps
    histogram: Tensor  # [R, B, C], NaN where unknown


class Sampled(NamedTuple):
    """Which rounds are gathered; tensors where the memory lives."""

    lanes: Tensor  # [R, 1] or [R, B] whose they are
    entries: Tensor  # [R, B] the number of each round
    oldest: Tensor  # [R, 1] or [R, B] number of the oldest round that is still there
    sketches: Tensor  # [lanes of the memory, rows, D] sketches of all rounds as networks see them


class ReplayMemory:
    """A ring of rounds for each of R lanes, from which n-step transitions are drawn."""

    def __init__(
        self,
        lanes: int,
        config: AgentConfig,
        sizes: AgentSizes,
        device: torch.device,
    ) -> None:
        """Allocate `config.buffer` rounds for each lane."""
        self.config = config
        self.device = device
        self.lanes = lanes
        self.capacity = config.buffer
        self.width = FIRST_WIDTH  # room for visible clients in a row
        room = (lanes, self.capacity)
        # Rounds are numbered from 0; round e is in row e % capacity until it is overwritten.
        self.count = np.zeros(lanes, dtype=np.int64)  # rounds that were ever added
        self.oldest = np.zeros(lanes, dtype=np.int64)  # number of the oldest that is left
        self.visible = np.zeros(room, dtype=np.int64)  # number of clients
        self.usable = np.zeros(room, dtype=bool)  # some update was used
        slots = (*room, self.width)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "clients": ((*slots, sizes.features(config)), torch.float32),
            "ids": (slots, torch.int64),
            "mask": (slots, torch.bool),
            "chosen": (slots, torch.bool),
            "sketch": ((*room, sizes.sketch_dim), torch.float32),
            "reward": ((*room, sizes.outputs(config)), torch.float32),
            "histogram": ((*room, sizes.num_classes), torch.float32),
            "k": (room, torch.int64),
        }
        self.rows: dict[str, Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            self.rows[name] = torch.zeros(shape, dtype=dtype, device=device)

    def add(self, rounds: Mapping[int, Round]) -> None:
        """Store one round of some lanes, each over the oldest one of its lane."""
        most_visible = max(len(item.ids) for item in rounds.values())
        while most_visible > self.width:
            self._widen()
        lanes = np.fromiter(rounds, dtype=np.int64)
        row_numbers = self.count[lanes] % self.capacity
        lane_index = torch.from_numpy(lanes).to(self.device)
        row_index = torch.from_numpy(row_numbers).to(self.device)
        for name, rows in self.rows.items():
            values = torch.zeros(len(lanes), *rows.shape[2:], dtype=rows.dtype)
            for row, item in zip(values, rounds.values(), strict=True):
                slots = slice(len(item.ids))
                if name == "mask":
                    row[slots] = True
                elif name in _BY_SLOT:
                    row[slots] = getattr(item, name)
                else:
                    value = getattr(item, name)
                    row.copy_(torch.as_tensor(value))
            rows[lane_index, row_index] = values.to(self.device)
        for lane, row_number, item in zip(lanes, row_numbers, rounds.values(), strict=True):
            self.visible[lane, row_number] = len(item.ids)
            self.usable[lane, row_number] = bool(item.chosen.any())
        self.count[lanes] += 1
        self.oldest = np.maximum(self.count - self.capacity, 0)

    def starts(self, lane: int) -> np.ndarray[Any, Any]:
        """Return the numbers of the rounds in which a transition of a lane begins, oldest first.

        Round t needs round t + n to be there, and a choice that was carried out.
        """
        first = self.oldest[lane]
        end = max(self.count[lane] - self.config.n_step, first)
        entries = np.arange(first, end)
        is_usable = self.usable[lane, entries % self.capacity]
        return entries[is_usable]

    def gather(self, starts: Sampled, width: int) -> NStepBatch:
        """Build transitions without what they lead to, Eq. (multistep_target).

        Args:
            starts: the rounds in which they begin.
            width: slots of an observation.
        """
        lanes = starts.lanes
        entries = starts.entries
        steps = torch.arange(self.config.n_step, device=self.device)
        discounts = self.config.gamma ** steps.float()  # [n]
        of_steps = entries.unsqueeze(2) + steps  # [R, B, n] round numbers
        (rewards,) = self.rows_of(lanes.unsqueeze(2), of_steps, "reward")
        discounted = rewards * discounts.unsqueeze(1)  # [R, B, n, 1 or C]
        chosen, histogram = self.rows_of(lanes, entries, "chosen", "histogram")
        return NStepBatch(
            obs=self.observe(starts, width),
            chosen=chosen[:, :, :width],
            returns=discounted.sum(dim=2),
            histogram=histogram,
        )

    def observe(self, rounds: Sampled, width: int) -> Observation:
        """Rebuild what was seen in some rounds.

        Args:
            rounds: which.
            width: slots of an observation.
        """
        lanes = rounds.lanes
        entries = rounds.entries
        clients, ids, mask = self.rows_of(lanes, entries, "clients", "ids", "mask")
        back = torch.arange(-self.config.history, 1, device=self.device)
        window = entries.unsqueeze(2) + back  # [R, B, H+1] round numbers
        num_rows = rounds.sketches.shape[1]
        flat_rows = lanes.unsqueeze(2) * num_rows + window % num_rows
        flat_sketches = rounds.sketches.flatten(0, 1)
        return Observation(
            clients=clients[:, :, :width],
            ids=ids[:, :, :width],
            mask=mask[:, :, :width],
            history=F.embedding(flat_rows, flat_sketches),
            history_mask=window >= rounds.oldest.unsqueeze(2),
        )

    def rows_of(self, lanes: Tensor, entries: Tensor, *names: str) -> list[Tensor]:
        """Return what is stored of rounds, one tensor `[R, B, ...]` for each name.

        Args:
            lanes: whose rounds.  # [R, B], or a shape that broadcasts to it
            entries: their numbers.  # [R, B]
            names: keys of `rows`.
        """
        flat_rows = lanes * self.capacity + entries % self.capacity  # [R, B]
        positions = flat_rows.flatten()
        gathered: list[Tensor] = []
        for name in names:
            stored = self.rows[name].flatten(0, 1)  # [R * capacity, ...]
            rows = stored.index_select(0, positions)
            shape = flat_rows.shape + stored.shape[1:]
            gathered.append(rows.view(shape))
        return gathered

    def _widen(self) -> None:
        """Double the room for visible clients."""
        self.width *= 2
        for name in _BY_SLOT:
            rows = self.rows[name]
            room = torch.zeros_like(rows)
            self.rows[name] = torch.cat([rows, room], dim=2)

    def state_dict(self, lane: int) -> dict[str, Any]:
        """Return everything needed to resume a lane; only rows in use."""
        used = int(min(self.count[lane], self.capacity))
        used_rows: dict[str, Tensor] = {}
        for name, rows in self.rows.items():
            used_rows[name] = rows[lane, :used].cpu().clone()
        return {"count": int(self.count[lane]), "rows": used_rows}

    def load_state_dict(self, lane: int, state: dict[str, Any]) -> None:
        """Resume a lane from `state`."""
        saved_rows = state["rows"]
        while self.width < saved_rows["ids"].shape[1]:
            self._widen()
        self.count[lane] = state["count"]
        self.oldest = np.maximum(self.count - self.capacity, 0)
        used = len(saved_rows["k"])
        for name, saved in saved_rows.items():
            rows = self.rows[name][lane]
            rows.zero_()
            inner = tuple(slice(size) for size in saved.shape)
            rows[inner] = saved.to(self.device)
        num_visible = saved_rows["mask"].sum(dim=1)
        any_chosen = saved_rows["chosen"].any(dim=1)
        self.visible[lane, :used] = num_visible.numpy()
        self.usable[lane, :used] = any_chosen.numpy()
