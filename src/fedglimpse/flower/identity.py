"""Who is who: stable identities of clients whose connections come and go.

A client is known by the name its key was registered under, else by the id it declares, else by
its node id. Methods see dense ids 0, 1, ...: an agent's memory of a client follows the identity,
not the connection. The three kinds of name never mix, so that nobody can declare himself to be a
registered client.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


def identity(registered: str, declared: str, node_id: int) -> str:
    """Return the identity of a node, marked with where it comes from."""
    if registered:
        return f"name:{registered}"
    if declared:
        return f"declared:{declared}"
    return f"node:{node_id}"


def natural(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key that puts site-2 before site-10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part]


@dataclass(frozen=True)
class Arrival:
    """A node that has said hello."""

    node_id: int
    name: str  # its identity
    size: int  # local examples, -1 where it did not say


@dataclass
class Roster:
    """All clients ever met, and the nodes they are reached at now."""

    room: int  # N, clients that methods are built for
    names: list[str] = field(default_factory=list)  # identity of every dense id
    sizes: list[int] = field(default_factory=list)  # last known local examples, -1: unknown
    nodes: dict[int, int] = field(default_factory=dict)  # dense id -> node id

    def admit(self, arrivals: Iterable[Arrival]) -> list[Arrival]:
        """Take in nodes; returns those for which there is no room.

        New identities get the next dense ids, in natural order of their names. An identity that
        was known keeps its id: the newest connection counts. A node that was known by another
        name is no longer reached by that one.
        """
        arrivals, left_out = list(arrivals), []
        moved = {arrival.node_id for arrival in arrivals}
        self.nodes = {client: node for client, node in self.nodes.items() if node not in moved}
        for arrival in sorted(arrivals, key=lambda a: natural(a.name)):
            if arrival.name not in self.names:
                if len(self.names) >= self.room:
                    left_out.append(arrival)
                    continue
                self.names.append(arrival.name)
                self.sizes.append(-1)
            client = self.names.index(arrival.name)
            self.nodes[client] = arrival.node_id
            if arrival.size >= 0 or self.sizes[client] == 0:
                self.sizes[client] = arrival.size
        return left_out

    def typical_sizes(self) -> list[int]:
        """Return the size of each of the N clients; of an unknown one, the mean of the others."""
        known = [size for size in self.sizes if size > 0]
        mean = round(sum(known) / len(known)) if known else 1
        all_sizes = [*self.sizes, *[-1] * (self.room - len(self.sizes))]
        return [size if size >= 0 else mean for size in all_sizes]

    def state_dict(self) -> dict[str, Any]:
        """Identities and sizes; connections do not outlive the server."""
        return {"names": list(self.names), "sizes": list(self.sizes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.names, self.sizes, self.nodes = list(state["names"]), list(state["sizes"]), {}
