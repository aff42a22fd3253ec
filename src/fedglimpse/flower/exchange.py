"""Sending to nodes and waiting for their replies, message by message.

Replies are matched by the id of the message they answer: an error made up by the SuperLink does not
name the node it is about. A node that has not answered in time gets no new
work until it has answered, failed, reconnected, or its message has expired: Flower does not cancel
work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedglimpse.flower import messages as wire

SILENT = "no answer"
LONGEST_PAUSE = 50  # a pause grows to this many times the first
_ERRORS = {2: "client app failed", 3: "message expired", 5: "node lost", 8: "client app stopped"}


@dataclass(frozen=True)
class Answer:
    """The reply of a node: content, or the reason why there is none."""

    content: RecordDict | None
    reason: str = ""
    bytes: int = 0

    @staticmethod
    def of(message: Message) -> Answer:
        """Read a reply."""
        if message.has_error():
            code = int(message.error.code)
            return Answer(None, _ERRORS.get(code, f"error {code}"))
        content = message.content
        size = wire.size_of(content)
        info = content.config_records.get("info")
        if info is None or "status" not in info:
            return Answer(None, "unreadable reply", size)
        status = str(info["status"])
        if status == wire.OK:
            return Answer(content, bytes=size)
        detail = str(info.get("detail", ""))
        reason = f"{status}: {detail}" if status and detail else status or detail
        return Answer(None, reason[:200], size)


class Pending(NamedTuple):
    """A message that was not answered in time."""

    node: int
    expiry: float  # when the node may get new work


@dataclass
class Exchange:
    """Sends messages to nodes and collects their answers."""

    grid: Grid
    poll: float = 0.01  # seconds between two polls, growing while nothing arrives
    patience: float = 3.0  # a message expires after this many times its phase's timeout
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    pending: dict[str, Pending] = field(default_factory=dict)  # by message id

    def busy(self) -> set[int]:
        """Return the nodes that have not answered a message yet."""
        self._pull(list(self.pending))  # late replies are dropped
        return {message.node for message in self.pending.values()}

    def forgive(self, nodes: Collection[int]) -> None:
        """Expect nothing more from nodes that have lost their work in a restart."""
        for message_id, message in list(self.pending.items()):
            if message.node in nodes:
                del self.pending[message_id]

    def ask(
        self, kind: str, requests: Mapping[int, RecordDict], timeout: float, group: str
    ) -> dict[int, Answer]:
        """Send one message to every node and wait until all have answered, or time is up.

        Args:
            kind: of the messages.
            requests: node id -> content.
            timeout: seconds.
            group: Flower's group id, the round.

        Returns:
            An answer for every node.
        """
        waiting = self._push(kind, requests, timeout, group)  # message id -> node
        answers = {node: Answer(None, "not sent") for node in requests}
        for node in waiting.values():
            answers[node] = Answer(None, SILENT)
        start = self.clock()
        end = start + timeout
        pause = self.poll
        while waiting:
            replies = self._pull([*waiting, *self.pending])
            for message_id, answer in replies.items():
                if message_id in waiting:
                    node = waiting.pop(message_id)
                    answers[node] = answer
            time_left = end - self.clock()
            if not waiting or time_left <= 0:
                break
            pause = self.poll if replies else min(pause * 1.2, LONGEST_PAUSE * self.poll)
            self.sleep(min(pause, time_left))
        expiry = start + timeout * self.patience
        for message_id, node in waiting.items():
            self.pending[message_id] = Pending(node, expiry)
        return answers

    def _push(
        self, kind: str, requests: Mapping[int, RecordDict], timeout: float, group: str
    ) -> dict[str, int]:
        """Send; returns message id -> node of the messages that went out."""
        if not requests:
            return {}
        messages = []
        for node, content in requests.items():
            message = Message(
                content=content,
                dst_node_id=node,
                message_type=kind,
                group_id=group,
                ttl=timeout * self.patience,
            )
            messages.append(message)
        sent_ids = set(self.grid.push_messages(messages))
        nodes = {}
        for message in messages:
            message_id = message.metadata.message_id
            if message_id and message_id in sent_ids:
                nodes[message_id] = message.metadata.dst_node_id
        return nodes

    def _pull(self, message_ids: list[str]) -> dict[str, Answer]:
        """Poll once; returns message id -> answer, and clears what is no longer pending."""
        answers = {}
        if message_ids:
            for message in self.grid.pull_messages(message_ids):
                answers[message.metadata.reply_to_message_id] = Answer.of(message)
        time_now = self.clock()
        for message_id, unanswered in list(self.pending.items()):
            if message_id in answers or unanswered.expiry <= time_now:
                del self.pending[message_id]
        return answers
