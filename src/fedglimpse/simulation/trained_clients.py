"""Clients that have trained in a round, and the states of those of several lanes as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    def joined(parts: Sequence[TrainedClients]) -> TrainedClients:
        """Return the clients of all parts, in order."""
        return TrainedClients(
            ids=torch.cat([part.ids for part in parts]),
            starts=torch.cat([part.starts for part in parts]),
            states=torch.cat([part.states for part in parts]),
            loss=torch.cat([part.loss for part in parts]),
            squared_loss=torch.cat([part.squared_loss for part in parts]),
        )


def pick_each(clients: Sequence[TrainedClients], slots: Sequence[Tensor]) -> list[TrainedClients]:
    """Pick clients of every lane by position; the states of all lanes are copied in one pass.

    Args:
        clients: of each lane.
        slots: the positions in each lane, on the CPU.
    """
    rows: list[int] = []  # positions among the clients of all lanes
    first_row = 0  # of a lane
    for trained, picked_slots in zip(clients, slots, strict=True):
        rows += [first_row + slot for slot in picked_slots.tolist()]
        first_row += trained.ids.shape[0]
    counts = [picked_slots.shape[0] for picked_slots in slots]
    row_index = torch.tensor(rows, dtype=torch.long)
    device = clients[0].states.device
    table = states_of(clients)
    states = table[row_index.to(device, non_blocking=True)].split(counts)
    ids = torch.cat([trained.ids for trained in clients])[row_index].split(counts)
    loss = torch.cat([trained.loss for trained in clients])[row_index].split(counts)
    squared_loss = torch.cat([trained.squared_loss for trained in clients])
    squared_loss = squared_loss[row_index].split(counts)
    picked = []
    for i, trained in enumerate(clients):
        if trained.starts.stride(0) == 0:  # all started from the same state: nothing to copy
            starts = trained.starts[: counts[i]]
        else:
            starts = trained.starts[slots[i].to(device)]
        picked.append(TrainedClients(ids[i], starts, states[i], loss[i], squared_loss[i]))
    return picked


def deltas_of(clients: Sequence[TrainedClients]) -> Tensor:
    """Return the deltas of all lanes' clients, one lane after the other `[J, d]`."""
    states = states_of(clients)
    count = clients[0].starts.shape[0]
    shares_start = all(
        trained.starts.shape[0] == count and trained.starts.stride(0) == 0 for trained in clients
    )
    if count and shares_start:  # one start for each lane is enough
        lane_starts = torch.cat([trained.starts[:1] for trained in clients])  # [R, d]
        lane_states = states.unflatten(0, (-1, count))  # [R, K, d]
        return (lane_states - lane_starts[:, None]).flatten(0, 1)
    return states - torch.cat([trained.starts for trained in clients])


def states_of(clients: Sequence[TrainedClients]) -> Tensor:
    """Return the states of all lanes' clients to read, one lane after the other `[J, d]`."""
    states = [trained.states for trained in clients]
    table = side_by_side(states)
    return torch.cat(states) if table is None else table


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors `[n, d]` as one without a copy; None where they are not neighbours in memory.

    A trainer returns the states of all lanes as one table, of which each lane gets a slice.
    """
    first = parts[0]
    width = first.shape[1]
    row_bytes = width * first.element_size()
    begin = first.data_ptr()
    rows = 0
    for part in parts:
        if part.data_ptr() != begin + rows * row_bytes or part.shape[1] != width:
            return None
        if part.dtype != first.dtype or not part.is_contiguous():
            return None
        rows += part.shape[0]
    memory = first.untyped_storage()
    if begin + rows * row_bytes > memory.data_ptr() + memory.nbytes():
        return None  # neighbours by chance, in memory of different tensors
    return first.as_strided((rows, width), (width, 1))
