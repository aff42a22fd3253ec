"""Asking nodes and waiting for their answers, message by message.

Replies are matched by the id of the message they answer: an error made up by the SuperLink does not
name the node it is about. A node that has not answered in time still owes its reply, and gets no
new work until it has answered, failed, come online anew, or its message has expired: Flower does
not cancel work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedglimpse.flower import messages as wire

SILENT = "no answer"
LONGEST = 50  # a pause grows to so many times the first
_ERRORS = {2: "client app failed", 3: "message expired", 5: "node lost", 8: "client app stopped"}


@dataclass(frozen=True)
class Answer:
    """What came back from a node: content, or the reason why there is none."""

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
        if info["status"] != wire.OK:
            said = [str(info["status"]), str(info.get("detail", ""))]
            return Answer(None, ": ".join(part for part in said if part)[:200], size)
        return Answer(content, bytes=size)


@dataclass
class Exchange:
    """The server's mailbox."""

    grid: Grid
    poll: float = 0.01  # seconds between looks, growing while nothing comes
    patience: float = 3.0  # a message expires after so many times its phase's timeout
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    owed: dict[str, tuple[int, float]] = field(default_factory=dict)  # message -> node, expiry

    def busy(self) -> set[int]:
        """Return the nodes that still owe a reply."""
        self._collect()
        return {node for node, _ in self.owed.values()}

    def forgive(self, nodes: Collection[int]) -> None:
        """Expect nothing more from nodes that have lost their work in a restart."""
        self.owed = {i: debt for i, debt in self.owed.items() if debt[0] not in nodes}

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
        waiting = self._push(kind, requests, timeout, group)
        answers = {node: Answer(None, "not sent") for node in requests}
        answers |= {node: Answer(None, SILENT) for node in waiting.values()}
        end, pause = self.clock() + timeout, self.poll
        expiry = self.clock() + timeout * self.patience
        while waiting:
            replies = self._pull([*waiting, *self.owed])
            for message_id, answer in replies.items():
                if message_id in waiting:
                    answers[waiting.pop(message_id)] = answer
            if not waiting or self.clock() >= end:
                break
            pause = self.poll if replies else min(pause * 1.2, LONGEST * self.poll)
            self.sleep(min(pause, max(end - self.clock(), 0.0)))
        self.owed |= {message_id: (node, expiry) for message_id, node in waiting.items()}
        return answers

    def _push(
        self, kind: str, requests: Mapping[int, RecordDict], timeout: float, group: str
    ) -> dict[str, int]:
        """Send; returns message id -> node of what went out."""
        ttl = timeout * self.patience
        messages = [
            Message(content=content, dst_node_id=node, message_type=kind, group_id=group, ttl=ttl)
            for node, content in requests.items()
        ]
        sent = {i for i in self.grid.push_messages(messages) if i} if messages else set()
        found = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
        return {message_id: node for message_id, node in found.items() if message_id in sent}

    def _pull(self, message_ids: list[str]) -> dict[str, Answer]:
        """Look once; returns message id -> answer, and strikes off what was owed."""
        replies = {}
        for message in self.grid.pull_messages(message_ids) if message_ids else ():
            replies[message.metadata.reply_to_message_id] = Answer.of(message)
        now = self.clock()
        self.owed = {
            i: (node, expiry)
            for i, (node, expiry) in self.owed.items()
            if i not in replies and expiry > now
        }
        return replies

    def _collect(self) -> None:
        """Take in late replies; their content is of no use any more."""
        self._pull(list(self.owed))
