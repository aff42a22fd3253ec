"""Copies of the replay stores of R agents side by side, where the networks are.

All mini-batches of all agents are gathered from them at once. A store stays on the CPU, small and
readable; its newest rounds are copied here before they are learnt from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.agent.inputs import Observation
from fedglimpse.agent.memory import Replay

Array = np.ndarray[Any, Any]


class Room(NamedTuple):
    """What an agent's transitions need in a pass; only agents with the same share one."""

    width: int  # clients in the widest visible set
    full: bool  # no slot and no past round is missing


class Later(NamedTuple):
    """What B transitions of each of R agents lead to, n steps later."""

    obs: Observation  # [R, B, ...]
    k: Tensor  # [R, B] budget of the choice there


class Transitions(NamedTuple):
    """B transitions of n steps of each of R agents, but for what they lead to."""

    obs: Observation  # [R, B, ...]
    chosen: Tensor  # [R, B, V] True for the chosen clients
    returns: Tensor  # [R, B] discounted rewards of the n steps, or [R, B, C] per class
    histogram: Tensor  # [R, B, C], NaN where unknown

    def part(self, rows: slice) -> Transitions:
        """Return some of the transitions of every agent."""

        def cut(value: Tensor | Observation) -> Tensor | Observation:
            if isinstance(value, Observation):
                return Observation(*(tensor[:, rows] for tensor in value))
            return value[:, rows]

        return Transitions(*(cut(value) for value in self))  # type: ignore[arg-type]


LEAST = 4  # slots of a pass: products of fewer rows round by the number of lanes
_BY_SLOT = ("clients", "ids", "mask", "chosen")  # one entry for each visible client
_COPIED = (*_BY_SLOT, "sketch", "reward", "histogram", "k")


class Bank:
    """The rows of replay stores in common tensors on one device."""

    def __init__(self, replays: Sequence[Replay], device: torch.device) -> None:
        """Name the stores; rows are copied by `update`."""
        self.replays, self.first, self.device = list(replays), replays[0], device
        self.rows: dict[str, Tensor] = {}  # name -> [R, capacity, ...]
        self._seen = [(-1, 0)] * len(replays)  # changes and count of every store when copied

    def update(self) -> None:
        """Copy what the stores have added since the last time."""
        width = max(replay.width for replay in self.replays)
        changed = any(
            changes != replay.changes
            for replay, (changes, _) in zip(self.replays, self._seen, strict=True)
        )
        if changed:
            self.rows = {name: self._all(name, width) for name in _COPIED}
        else:
            self._add_newest(width)
        self._seen = [(replay.changes, replay.count) for replay in self.replays]

    def _all(self, name: str, width: int) -> Tensor:
        return torch.stack([_wide(name, r.rows[name], width) for r in self.replays]).to(self.device)

    def _add_newest(self, width: int) -> None:
        """Copy the rounds that were added, of all stores in one transfer for each kind of row."""
        pairs = [
            (r, entry % replay.capacity)
            for r, (replay, (_, count)) in enumerate(zip(self.replays, self._seen, strict=True))
            for entry in range(max(count, replay.oldest), replay.count)
        ]
        if not pairs:
            return
        lanes, places = torch.tensor(pairs).to(self.device).unbind(1)
        for name in _COPIED:
            new = [self.replays[r].arrays[name][row] for r, row in pairs]
            if name in _BY_SLOT:
                new = [row if len(row) == width else _widened(row, width) for row in new]
            self.rows[name][lanes, places] = torch.from_numpy(np.array(new)).to(self.device)

    @property
    def width(self) -> int:
        """Room for visible clients in a row."""
        return self.rows["ids"].shape[2]

    def gather(self, lanes: Tensor, entries: Tensor, oldest: Tensor, width: int) -> Transitions:
        """Build transitions; all arguments but `width` lie where the rows do.

        Args:
            lanes: whose they are.  # [R', 1]
            entries: where they begin.  # [R', B]
            oldest: the oldest entry that still exists.  # [R']
            width: slots of an observation.
        """
        store, n = self.first, self.first.n_step
        rows, ahead = entries % store.capacity, torch.arange(n, device=entries.device)
        powers = (store.gamma ** ahead.float())[:, None]  # [n, 1]
        steps = (entries[:, :, None] + ahead) % store.capacity  # [R, B, n]
        returns = (self.rows["reward"][lanes[:, :, None], steps] * powers).sum(dim=2)
        return Transitions(
            obs=self._observe(lanes, entries, oldest, width),
            chosen=self.rows["chosen"][lanes, rows][:, :, :width],
            returns=returns.squeeze(-1),
            histogram=self.rows["histogram"][lanes, rows],
        )

    def later(self, lanes: Tensor, entries: Tensor, oldest: Tensor, width: int) -> Later:
        """Build what the transitions at `entries` lead to; arguments as in `gather`."""
        there = entries + self.first.n_step
        return Later(
            obs=self._observe(lanes, there, oldest, width),
            k=self.rows["k"][lanes, there % self.first.capacity],
        )

    def _observe(self, lanes: Tensor, entries: Tensor, oldest: Tensor, width: int) -> Observation:
        store = self.first
        rows = entries % store.capacity
        back = torch.arange(-store.history, 1, device=entries.device)
        window = entries[:, :, None] + back  # [R, B, H+1]
        return Observation(
            clients=self.rows["clients"][:, :, :width][lanes, rows],
            ids=self.rows["ids"][:, :, :width][lanes, rows],
            mask=self.rows["mask"][:, :, :width][lanes, rows],
            history=self.rows["sketch"][lanes[:, :, None], window % store.capacity],
            history_mask=window >= oldest[:, None, None],
        )


def _wide(name: str, rows: Tensor, width: int) -> Tensor:
    """Pad the slots of visible sets `[n, V, ...]` to `width`; other rows have none."""
    if name not in _BY_SLOT or rows.shape[1] == width:
        return rows
    return F.pad(rows, (0,) * 2 * (rows.dim() - 2) + (0, width - rows.shape[1]))


def _widened(row: Array, width: int) -> Array:
    """Pad the slots of one visible set `[V, ...]` to `width`."""
    wide = np.zeros((width, *row.shape[1:]), dtype=row.dtype)
    wide[: len(row)] = row
    return wide


def room_for(replay: Replay, entries: Tensor) -> Room:
    """Say how much room the transitions of an agent at `entries` need, with all they lead to."""
    both = torch.stack([entries, entries + replay.n_step]) % replay.capacity
    low, high = (int(count) for count in replay.rows["visible"][both].aminmax())
    width = max(high, LEAST)
    return Room(width, low == width and int(entries.min()) - replay.history >= replay.oldest)


def distinct(entries: Tensor) -> tuple[Tensor, Tensor]:
    """Return every entry number of each agent once, and where each of `entries` is found there.

    Args:
        entries: with repetitions.  # [R, B]

    Returns:
        Entry numbers, padded with repetitions `[R, U]`, and places `[R, B]`.
    """
    rows = [row.unique(return_inverse=True) for row in entries]
    longest = max(len(once) for once, _ in rows)
    padded = [torch.cat([once, once[:1].expand(longest - len(once))]) for once, _ in rows]
    return torch.stack(padded), torch.stack([places for _, places in rows])
