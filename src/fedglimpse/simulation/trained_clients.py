"""Clients that have trained in a round, and the states of those of several lanes as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainedClients:
    """Clients of one lane that have trained in this round."""

    ids: Tensor  # [V] on the CPU
    starts: Tensor  # [V, d] what they trained from; stride 0 where all started from the same state
    states: Tensor  # [V, d] their trained states
    loss: Tensor  # [V] mean training loss, on the CPU
    squared_loss: Tensor  # [V] mean squared training loss of an example, on the CPU

    @property
    def deltas(self) -> Tensor:
        """Trained states minus starts `[V, d]`."""
        return self.states - self.starts

    def pick(self, slots: Tensor) -> TrainedClients:
        """Return the clients at these positions, in this order."""
        return pick_each([self], [slots])[0]

    @staticmethod
    def joined(links: Sequence[TrainedClients]) -> TrainedClients:
        """Return the clients that trained one after another, in order."""
        columns: dict[str, list[Tensor]] = {field.name: [] for field in fields(TrainedClients)}
        for clients in links:
            for name, column in columns.items():
                column.append(getattr(clients, name))
        return TrainedClients(**{name: torch.cat(column) for name, column in columns.items()})


def pick_each(clients: Sequence[TrainedClients], slots: Sequence[Tensor]) -> list[TrainedClients]:
    """Pick clients of every lane by position; the states of all lanes are copied in one pass.

    Args:
        clients: of each lane.
        slots: the positions in each lane, on the CPU.
    """
    rows: list[int] = []  # positions among the clients of all lanes
    first_row = 0  # of a lane
    for trained, lane_slots in zip(clients, slots, strict=True):
        rows += [first_row + slot for slot in lane_slots.tolist()]
        first_row += trained.ids.shape[0]
    device = clients[0].states.device
    row_index = torch.tensor(rows, dtype=torch.long).to(device, non_blocking=True)
    states = states_of(clients)[row_index]
    picked = []
    first_row = 0  # of a lane in `states`
    for trained, lane_slots in zip(clients, slots, strict=True):
        last_row = first_row + lane_slots.shape[0]
        if trained.starts.stride(0) == 0:  # all started from the same state: nothing to copy
            starts = trained.starts[: lane_slots.shape[0]]
        else:
            starts = trained.starts[lane_slots.to(device)]
        picked.append(
            TrainedClients(
                ids=trained.ids[lane_slots],
                starts=starts,
                states=states[first_row:last_row],
                loss=trained.loss[lane_slots],
                squared_loss=trained.squared_loss[lane_slots],
            )
        )
        first_row = last_row
    return picked


def deltas_of(clients: Sequence[TrainedClients]) -> Tensor:
    """Return the deltas of all lanes' clients, one lane after the other `[J, d]`."""
    states = states_of(clients)
    starts = [trained.starts for trained in clients]
    count = starts[0].shape[0]
    if count and all(rows.shape[0] == count and rows.stride(0) == 0 for rows in starts):
        lane_starts = torch.cat([rows[:1] for rows in starts])  # [R, d] one for each lane is enough
        lane_states = states.unflatten(0, (-1, count))  # [R, K, d]
        return (lane_states - lane_starts[:, None]).flatten(0, 1)
    return states - torch.cat(starts)


def states_of(clients: Sequence[TrainedClients]) -> Tensor:
    """Return the states of all lanes' clients to read, one lane after the other `[J, d]`."""
    states = [trained.states for trained in clients]
    table = side_by_side(states)
    return torch.cat(states) if table is None else table


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return tensors `[n, d]` as one without a copy; None where they are not neighbours in memory.

    A trainer returns the states of all lanes as one table, of which each lane gets a slice.
    """
    first = tensors[0]
    width = first.shape[1]
    row_bytes = width * first.element_size()
    begin = first.data_ptr()
    rows = 0
    for tensor in tensors:
        if tensor.data_ptr() != begin + rows * row_bytes or tensor.shape[1] != width:
            return None
        if tensor.dtype != first.dtype or not tensor.is_contiguous():
            return None
        rows += tensor.shape[0]
    memory = first.untyped_storage()
    if begin + rows * row_bytes > memory.data_ptr() + memory.nbytes():
        return None  # neighbours by chance, in memory of different tensors
    return first.as_strided((rows, width), (width, 1))
