"""Clients that have trained in a round, and the states of those of all lanes as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse.simulation.transfer import sent


@dataclass(frozen=True)
class TrainedClients:
    """Clients of one lane that have trained in this round."""

    ids: Tensor  # [V] on the CPU
    starts: Tensor  # [V, d] what they trained from
    states: Tensor  # [V, d] what came of it
    loss: Tensor  # [V] mean training loss, on the CPU
    squared_loss: Tensor  # [V] mean squared training loss of an example, on the CPU

    @property
    def deltas(self) -> Tensor:
        """Trained states minus starts `[V, d]`."""
        return self.states - self.starts

    def pick(self, slots: Tensor) -> TrainedClients:
        """Return the clients at these positions, in this order."""
        return pick_each([self], [slots])[0]


def pick_each(clients: Sequence[TrainedClients], slots: Sequence[Tensor]) -> list[TrainedClients]:
    """Pick some clients of every lane, by position; their states are copied in one go."""
    if not clients:
        return []
    counts, numbers = [places.shape[0] for places in slots], []
    first = 0  # position of a lane's first client among those of all lanes
    for one, places in zip(clients, slots, strict=True):
        numbers += [first + i for i in places.tolist()]
        first += one.ids.shape[0]
    at = torch.tensor(numbers, dtype=torch.long)
    device, whole = clients[0].states.device, side_by_side([one.states for one in clients])
    if whole is not None:
        states = whole[sent(at, device)]
    else:
        pairs = zip(clients, slots, strict=True)
        states = torch.cat([one.states[places.to(device)] for one, places in pairs])
    small = ("ids", "loss", "squared_loss")  # a number for each client, on the CPU
    joined = (torch.cat([getattr(one, name) for one in clients])[at] for name in small)
    parts = (some.split(counts) for some in (states, *joined))
    picked = []
    for one, places, part, *own_numbers in zip(clients, slots, *parts, strict=True):
        common = one.starts.stride(0) == 0  # all started from the same state: nothing to copy
        starts = one.starts[: places.shape[0]] if common else one.starts[places.to(part.device)]
        picked.append(TrainedClients(own_numbers[0], starts, part, *own_numbers[1:]))
    return picked


def deltas_of(clients: Sequence[TrainedClients]) -> Tensor:
    """Return the deltas of all lanes' clients, one lane after the other `[J, d]`."""
    states = states_of(clients)
    starts, count = [one.starts for one in clients], clients[0].starts.shape[0]
    if count and all(own.shape[0] == count and own.stride(0) == 0 for own in starts):
        each = torch.cat([own[:1] for own in starts])  # [R, d]: all of a lane started from the same
        return (states.unflatten(0, (-1, count)) - each[:, None]).flatten(0, 1)
    return states - torch.cat(starts)


def states_of(clients: Sequence[TrainedClients]) -> Tensor:
    """Return the states of all lanes' clients to read, one lane after the other `[J, d]`."""
    states = [one.states for one in clients]
    whole = side_by_side(states)
    return torch.cat(states) if whole is None else whole


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors `[n, d]` as one, nothing copied; None where they do not lie side by side."""
    first, rows, width = parts[0], 0, parts[0].shape[1]
    begin, row_bytes = first.data_ptr(), width * first.element_size()
    for part in parts:
        count, own_width = part.shape
        if part.data_ptr() != begin + rows * row_bytes or own_width != width:
            return None
        if part.dtype != first.dtype or not part.is_contiguous():
            return None
        rows += count
    memory = first.untyped_storage()
    if begin + rows * row_bytes > memory.data_ptr() + memory.nbytes():
        return None  # neighbours by chance
    return first.as_strided((rows, width), (width, 1))
