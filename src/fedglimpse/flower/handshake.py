"""Meeting clients: who is online, who they are, and whether they can take part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import RecordDict

from fedglimpse.flower import messages as wire
from fedglimpse.flower.checks import size_in
from fedglimpse.flower.exchange import Exchange
from fedglimpse.flower.identity import Arrival, Roster, identity

log = logging.getLogger("flwr.fedglimpse")


class Reception:
    """Says hello to every connection once, and keeps the roster up to date.

    A client that had no data is asked again before every round.
    """

    def __init__(
        self,
        exchange: Exchange,
        roster: Roster,
        told: Mapping[str, wire.Plain],
        hello_timeout: float,
        wanted: frozenset[str],
    ) -> None:
        """Know nobody.

        Args:
            exchange: how nodes are asked.
            roster: who has been met; in here it learns of connections.
            told: what clients are told in a hello, besides the round.
            hello_timeout: seconds.
            wanted: what a client must be able to do, reports and objectives.
        """
        self.exchange, self.roster, self.told = exchange, roster, told
        self.hello_timeout, self.wanted = hello_timeout, wanted
        self.refusals: dict[int, str] = {}  # node -> the sentence about it
        self._since: dict[int, str] = {}  # node -> when it came online, as the SuperLink says
        self._met: dict[int, str] = {}  # the same, when it said hello
        self._listed: set[int] = set()  # nodes that the SuperLink thinks are online
        self._asked: dict[int, int] = {}  # node -> the round before which it was greeted last
        self._serves: dict[int, frozenset[str]] = {}

    def online(self, round_num: int) -> list[int]:
        """Return the dense ids that are there now, also without data; newcomers are greeted."""
        nodes = {int(n.node_id): n for n in self.exchange.grid.get_nodes()}
        since = {node: _since(info) for node, info in nodes.items()}
        self.exchange.forgive({n for n in since if self._since.get(n, since[n]) != since[n]})
        self._since |= since
        self._listed = set(nodes)
        busy = self.exchange.busy()
        again = self._without_data(round_num)
        new = [n for n in nodes if n not in busy and (self._met.get(n) != since[n] or n in again)]
        if new:
            self._greet({n: nodes[n] for n in new}, round_num)
            busy = self.exchange.busy()
        usable = {
            client: node
            for client, node in self.roster.nodes.items()
            if node in nodes and node not in busy and self._fits(client, node)
        }
        return sorted(usable)

    def _without_data(self, round_num: int) -> set[int]:
        """Return the nodes that said they have no data, and were not asked again in this round."""
        known, sizes = self.roster.nodes.items(), self.roster.sizes
        return {n for c, n in known if sizes[c] == 0 and self._asked.get(n) != round_num}

    def _greet(self, nodes: Mapping[int, Any], round_num: int) -> None:
        """Say hello and take in those that answer."""
        hello = wire.request({**self.told, "round": round_num}, {})
        requests = dict.fromkeys(nodes, hello)
        answers = self.exchange.ask(wire.HELLO, requests, self.hello_timeout, str(round_num))
        arrivals = []
        for node, answer in answers.items():
            self._asked[node] = round_num
            if answer.content is None:
                sentence = f"Node {node} did not say hello: {answer.reason}."
                self._note(node, sentence, logging.WARNING)
                continue
            self._met[node] = self._since[node]
            arrivals.append(self._arrival(node, str(nodes[node].name), answer.content))
        self._admit([a for a in arrivals if a is not None])

    def _arrival(self, node: int, registered: str, content: RecordDict) -> Arrival | None:
        info = content.config_records["info"]
        declared = str(info.get("client-id", ""))[:100]
        name = identity(registered, declared, node)
        if sentence := wire.mismatch(f"Client '{name}'", str(info.get("version", ""))):
            self._refuse(node, sentence)
            return None
        self._serves[node] = wire.names_in(info, "serves")
        self.refusals.pop(node, None)
        return Arrival(node, name, size_in(content, -1))

    def _admit(self, arrivals: list[Arrival]) -> None:
        """Take nodes into the roster; of several with one name, only the newest gets work."""
        anew = {arrival.node_id for arrival in arrivals}
        known = {c: node for c, node in self.roster.nodes.items() if node not in anew}
        at = {self.roster.names[client]: node for client, node in known.items()}
        for arrival in arrivals:
            older = at.get(arrival.name, arrival.node_id)
            if older != arrival.node_id and older in self._listed:
                self._refuse(
                    older,
                    f"Nodes {older} and {arrival.node_id} both say that they are "
                    f"'{arrival.name}', so only the second gets work: if they are two devices, "
                    "give each its own client-id in --node-config, or register keys with names.",
                )
            at[arrival.name] = arrival.node_id
        arrivals = [a for a in arrivals if at[a.name] == a.node_id]
        for left_out in self.roster.admit(arrivals):
            self._refuse(
                left_out.node_id,
                f"Client '{left_out.name}' is one more than data.clients={self.roster.room}: raise "
                "it in a new run to let more clients in.",
            )

    def _fits(self, client: int, node: int) -> bool:
        """Check that a client can do what the method asks for; say so once if not."""
        missing = self.wanted - self._serves.get(node, frozenset())
        if missing and node not in self.refusals:
            self._refuse(
                node,
                f"Client '{self.roster.names[client]}' cannot serve {', '.join(sorted(missing))}, "
                "which the method needs: give client_app data= or objectives=.",
            )
        return not missing

    def _refuse(self, node: int, sentence: str) -> None:
        self.roster.nodes = {c: n for c, n in self.roster.nodes.items() if n != node}
        self._note(node, sentence)

    def _note(self, node: int, sentence: str, level: int = logging.ERROR) -> None:
        """Keep what is wrong with a node, and say it once."""
        if self.refusals.get(node) != sentence:
            log.log(level, "%s", sentence)
        self.refusals[node] = sentence


def wait_until(
    ready: Callable[[], bool], exchange: Exchange, timeout: float, pause: float = 0.5
) -> bool:
    """Ask `ready` again and again; False where it was not before the timeout."""
    end = exchange.clock() + timeout
    while not ready():
        if exchange.clock() >= end:
            return False
        exchange.sleep(pause)
    return True


def _since(info: Any) -> str:
    """Return when a node last came online, as far as the SuperLink says it."""
    return str(getattr(info, "last_activated_at", "") or "")
