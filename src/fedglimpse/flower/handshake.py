"""Which clients are online, their identities, and whether they can take part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import RecordDict

from fedglimpse.flower import messages as wire
from fedglimpse.flower.clients import UNKNOWN_SIZE, Arrival, KnownClients, identity
from fedglimpse.flower.exchange import Exchange
from fedglimpse.flower.requests import Refused, size_in

log = logging.getLogger("flwr.fedglimpse")


class Handshake:
    """Says hello to every connection once, and keeps the known clients up to date.

    A client that had no data is asked again before every round.
    """

    def __init__(
        self,
        exchange: Exchange,
        clients: KnownClients,
        settings: Mapping[str, wire.Plain],
        hello_timeout: float,
        required: frozenset[str],
        max_examples: int,
    ) -> None:
        """Begin with no client greeted on its present connection.

        Args:
            exchange: how nodes are asked.
            clients: all clients met so far; their connections are updated in it.
            settings: sent in a hello, besides the round.
            hello_timeout: seconds.
            required: what a client must be able to do, reports and objectives.
            max_examples: of a client that is believed.
        """
        self.exchange = exchange
        self.clients = clients
        self.settings = settings
        self.hello_timeout = hello_timeout
        self.required = required
        self.max_examples = max_examples
        self.refusals: dict[int, str] = {}  # node -> the sentence about it
        self._online_since: dict[int, str] = {}  # node -> since when, according to the SuperLink
        self._greeted_since: dict[int, str] = {}  # the same, when it said hello
        self._listed: set[int] = set()  # nodes that the SuperLink thinks are online
        self._last_asked: dict[int, int] = {}  # node -> the round before which it was greeted last
        self._serves: dict[int, frozenset[str]] = {}  # node -> what it can do

    def online(self, round_num: int) -> list[int]:
        """Return the dense ids that can be reached, also without data; newcomers are greeted."""
        nodes: dict[int, Any] = {}
        for info in self.exchange.grid.get_nodes():
            nodes[int(info.node_id)] = info
        self._note_connections(nodes)
        busy = self.exchange.busy()
        new = self._to_greet(nodes, busy, round_num)
        if new:
            self._greet(new, round_num)
            busy = self.exchange.busy()
        usable = []
        for client, node in self.clients.nodes.items():
            if node in nodes and node not in busy and self._fits(client, node):
                usable.append(client)
        return sorted(usable)

    def _note_connections(self, nodes: Mapping[int, Any]) -> None:
        """Note which nodes are online since when; one that has restarted has lost its messages."""
        restarted = set()
        for node, info in nodes.items():
            since = _online_since(info)
            if self._online_since.get(node, since) != since:
                restarted.add(node)
            self._online_since[node] = since
        self.exchange.forgive(restarted)
        self._listed = set(nodes)

    def _to_greet(
        self,
        nodes: Mapping[int, Any],
        busy: set[int],
        round_num: int,
    ) -> dict[int, Any]:
        """Return the nodes that have not said hello on this connection, or had no data."""
        without_data = set()
        for client, node in self.clients.nodes.items():
            asked_already = self._last_asked.get(node) == round_num
            if self.clients.sizes[client] == 0 and not asked_already:
                without_data.add(node)
        new = {}
        for node, info in nodes.items():
            greeted = self._greeted_since.get(node) == self._online_since[node]
            if node not in busy and (not greeted or node in without_data):
                new[node] = info
        return new

    def _greet(self, nodes: Mapping[int, Any], round_num: int) -> None:
        """Say hello and take in those that answer."""
        hello = wire.request({**self.settings, "round": round_num}, {})
        requests = dict.fromkeys(nodes, hello)
        answers = self.exchange.ask(
            wire.HELLO,
            requests,
            self.hello_timeout,
            str(round_num),
        )
        arrivals = []
        for node, answer in answers.items():
            self._last_asked[node] = round_num
            if answer.content is None:
                sentence = f"Node {node} did not say hello: {answer.reason}."
                self._note(node, sentence, logging.WARNING)
                continue
            self._greeted_since[node] = self._online_since[node]
            registered = str(nodes[node].name)
            arrival = self._arrival(node, registered, answer.content)
            if arrival is not None:
                arrivals.append(arrival)
        self._admit(arrivals)

    def _arrival(self, node: int, registered: str, content: RecordDict) -> Arrival | None:
        """Read the answer to a hello; None where the client runs another version."""
        info = content.config_records["info"]
        declared = str(info.get("client-id", ""))[:100]
        name = identity(registered, declared, node)
        version = str(info.get("version", ""))
        sentence = wire.version_mismatch(f"Client '{name}'", version)
        if sentence is not None:
            self._refuse(node, sentence)
            return None
        self._serves[node] = wire.names_in(info, "serves")
        self.refusals.pop(node, None)
        try:
            size = size_in(content, UNKNOWN_SIZE, self.max_examples)
        except Refused as refusal:  # its updates will be refused, too, where they say the same
            size = UNKNOWN_SIZE
            log.warning("Client '%s' says that it has %s.", name, refusal)
        return Arrival(node_id=node, name=name, size=size)

    def _admit(self, arrivals: list[Arrival]) -> None:
        """Take in nodes; of several with one name, only the newest gets work."""
        arrived = {arrival.node_id for arrival in arrivals}
        node_of = {}  # identity -> the newest node
        for client, node in self.clients.nodes.items():
            if node not in arrived:
                node_of[self.clients.names[client]] = node
        for arrival in arrivals:
            older = node_of.get(arrival.name, arrival.node_id)
            if older != arrival.node_id and older in self._listed:
                self._refuse_twin(older, arrival)
            node_of[arrival.name] = arrival.node_id
        newest = []
        for arrival in arrivals:
            if node_of[arrival.name] == arrival.node_id:
                newest.append(arrival)
        for left_out in self.clients.admit(newest):
            self._refuse(
                left_out.node_id,
                f"Client '{left_out.name}' is one more than data.clients={self.clients.capacity}: "
                "raise it in a new run to let more clients in.",
            )

    def _refuse_twin(self, older: int, arrival: Arrival) -> None:
        self._refuse(
            older,
            f"Nodes {older} and {arrival.node_id} both say that they are '{arrival.name}', so only "
            "the second gets work: if they are two devices, give each its own client-id in "
            "--node-config, or register keys with names.",
        )

    def _fits(self, client: int, node: int) -> bool:
        """Check that a client can do what the method asks for; say so once if not."""
        missing = self.required - self._serves.get(node, frozenset())
        if missing and node not in self.refusals:
            self._refuse(
                node,
                f"Client '{self.clients.names[client]}' cannot serve {', '.join(sorted(missing))}, "
                "which the method needs: give client_app data= or objectives=.",
            )
        return not missing

    def _refuse(self, node: int, sentence: str) -> None:
        self.clients.drop_nodes({node})
        self._note(node, sentence)

    def _note(self, node: int, sentence: str, level: int = logging.ERROR) -> None:
        """Keep the reason why a node gets no work, and log it once."""
        if self.refusals.get(node) != sentence:
            log.log(level, "%s", sentence)
        self.refusals[node] = sentence


def wait_until(
    ready: Callable[[], bool],
    exchange: Exchange,
    timeout: float,
    pause: float = 0.5,
) -> bool:
    """Poll `ready` until it is true; False where that takes longer than `timeout` seconds."""
    end = exchange.clock() + timeout
    while not ready():
        if exchange.clock() >= end:
            return False
        exchange.sleep(pause)
    return True


def _online_since(info: Any) -> str:
    """Return when a node last came online, where the SuperLink says so."""
    since = getattr(info, "last_activated_at", None)
    return str(since or "")
