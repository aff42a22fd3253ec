"""Stable identities of clients whose connections come and go.

A client is known by the name its key was registered under, else by the id it declares, else by
its node id. Methods see dense ids 0, 1, ...: an agent's memory of a client follows the identity,
not the connection. The three kinds of name never mix, so that nobody can pose as a registered
client.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

UNKNOWN_SIZE = -1  # of a client that did not say how many examples it has


def identity(registered: str, declared: str, node_id: int) -> str:
    """Return the identity of a node, marked with where it comes from."""
    if registered:
        return f"name:{registered}"
    if declared:
        return f"declared:{declared}"
    return f"node:{node_id}"


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts site-2 before site-10."""
    key: list[tuple[int, int | str]] = []
    for piece in re.split(r"(\d+)", name):
        if piece.isdecimal():
            key.append((0, int(piece)))
        elif piece:
            key.append((1, piece))
    return key


@dataclass(frozen=True)
class Arrival:
    """A node that has said hello."""

    node_id: int
    name: str  # its identity
    size: int  # local examples, or UNKNOWN_SIZE


@dataclass
class KnownClients:
    """All clients ever met, and the nodes they are reached at."""

    capacity: int  # N, clients that methods are built for
    names: list[str] = field(default_factory=list)  # identity of every dense id
    sizes: list[int] = field(default_factory=list)  # last reported local examples
    nodes: dict[int, int] = field(default_factory=dict)  # dense id -> node id

    def admit(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """Take in nodes; returns those beyond the capacity.

        New identities get the next dense ids, in natural order of their names. A known identity
        keeps its id: the newest connection counts. A node that was known by another name is no
        longer reached by that one.
        """
        self.drop_nodes({arrival.node_id for arrival in arrivals})
        left_out = []
        for arrival in sorted(arrivals, key=lambda arrival: natural(arrival.name)):
            if arrival.name not in self.names:
                if len(self.names) >= self.capacity:
                    left_out.append(arrival)
                    continue
                self.names.append(arrival.name)
                self.sizes.append(UNKNOWN_SIZE)
            client = self.names.index(arrival.name)
            self.nodes[client] = arrival.node_id
            if arrival.size != UNKNOWN_SIZE or self.sizes[client] == 0:
                self.sizes[client] = arrival.size
        return left_out

    def drop_nodes(self, node_ids: Collection[int]) -> None:
        """Forget these nodes: no client is reached at them."""
        remaining = {}  # a new table: callers may be iterating over the old one
        for client, node in self.nodes.items():
            if node not in node_ids:
                remaining[client] = node
        self.nodes = remaining

    def typical_sizes(self) -> list[int]:
        """Return the size of each of the N clients; of an unknown one, the mean of the others."""
        positive = [size for size in self.sizes if size > 0]
        mean = 1
        if positive:
            mean = round(sum(positive) / len(positive))
        sizes = []
        for size in self.sizes:
            sizes.append(mean if size == UNKNOWN_SIZE else size)
        num_unmet = self.capacity - len(self.sizes)
        return sizes + [mean] * num_unmet

    def state_dict(self) -> dict[str, Any]:
        """Identities and sizes; connections do not outlive the server."""
        return {"names": list(self.names), "sizes": list(self.sizes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, with no client connected."""
        self.names = list(state["names"])
        self.sizes = list(state["sizes"])
        self.nodes = {}
