"""The replay stores of R agents side by side, so that all their mini-batches are drawn at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedglimpse.rl.observation import Observation
from fedglimpse.rl.replay import Replay


class Draw(NamedTuple):
    """Which transitions every agent learns from, known on the CPU."""

    entries: Tensor  # [R, B] entry numbers; those without weight mean nothing
    oldest: Tensor  # [R] oldest entry that still exists
    width: int  # clients in the widest visible set
    full: bool  # no slot and no past round is missing


class Transitions(NamedTuple):
    """B transitions of n steps of each of R agents."""

    obs: Observation  # [R, B, ...]
    chosen: Tensor  # [R, B, V] True for the chosen clients
    returns: Tensor  # [R, B] discounted rewards of the n steps, or [R, B, C] per class
    next_obs: Observation  # [R, B, ...]
    next_k: Tensor  # [R, B] budget of the later choice
    histogram: Tensor  # [R, B, C], NaN where unknown

    def part(self, rows: slice) -> Transitions:
        """Return some of the transitions of every agent."""

        def cut(value: Tensor | Observation) -> Tensor | Observation:
            if isinstance(value, Observation):
                return Observation(*(tensor[:, rows] for tensor in value))
            return value[:, rows]

        return Transitions(*(cut(value) for value in self))  # type: ignore[arg-type]


class Bank:
    """Rows of replay stores in common tensors; each store keeps a view of its own."""

    def __init__(self, replays: Sequence[Replay]) -> None:
        """Move the rows of `replays` into common tensors."""
        self.first = replays[0]
        widest = max(replay.width for replay in replays)
        for replay in replays:
            while replay.width < widest:
                replay.widen()
        self.rows = {
            name: torch.stack([replay.rows[name] for replay in replays]) for name in self.first.rows
        }  # [R, capacity, ...]
        for r, replay in enumerate(replays):
            replay.rows = {name: rows[r] for name, rows in self.rows.items()}

    def holds(self, replays: Sequence[Replay]) -> bool:
        """True while the stores' rows still are views of these."""
        return all(
            rows.data_ptr() == self.rows[name][r].data_ptr()
            for r, replay in enumerate(replays)
            for name, rows in replay.rows.items()
        )

    def plan(self, replays: Sequence[Replay], entries: Tensor) -> Draw:
        """Say how much room the transitions at `entries` `[R, B]` need."""
        oldest = torch.tensor([replay.oldest for replay in replays])
        visible = torch.stack([replay.book["visible"] for replay in replays])  # [R, capacity]
        both = torch.cat([entries, entries + self.first.n_step], dim=1) % self.first.capacity
        counts = visible.gather(1, both)
        width = int(counts.max())
        whole = bool((entries - self.first.history >= oldest[:, None]).all())
        return Draw(entries, oldest, width, whole and int(counts.min()) == width)

    def gather(self, entries: Tensor, oldest: Tensor, width: int) -> Transitions:
        """Build transitions; all arguments but `width` lie where the rows do.

        Args:
            entries: where they begin.  # [R, B]
            oldest: the oldest entry that still exists.  # [R]
            width: slots of an observation.
        """
        store, n = self.first, self.first.n_step
        lanes = torch.arange(len(entries), device=entries.device)[:, None]
        rows, ahead = entries % store.capacity, torch.arange(n, device=entries.device)
        powers = (store.gamma ** ahead.float())[:, None]  # [n, 1]
        steps = (entries[:, :, None] + ahead) % store.capacity  # [R, B, n]
        returns = (self.rows["reward"][lanes[:, :, None], steps] * powers).sum(dim=2)
        return Transitions(
            obs=self._observe(lanes, entries, oldest, width),
            chosen=self.rows["chosen"][lanes, rows][:, :, :width],
            returns=returns.squeeze(-1),
            next_obs=self._observe(lanes, entries + n, oldest, width),
            next_k=self.rows["k"][lanes, (entries + n) % store.capacity],
            histogram=self.rows["histogram"][lanes, rows],
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
