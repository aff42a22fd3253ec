"""A grid in memory: real client apps, no processes, no waiting; time is a counter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Fault = Callable[[Message], Any]  # None: no fault; "silent"; an error code; a reply to send


class FakeNode:
    """One SuperNode with its client app and its memory."""

    def __init__(self, node_id: int, app: ClientApp, config: dict[str, Any], name: str) -> None:
        self.node_id = node_id
        self.app = app
        self.name = name
        self.config = config
        self.last_activated_at = "0"
        self.online = True
        self.fault: Fault = lambda message: None
        self.asked: list[str] = []  # kinds of messages
        self.forget()

    def forget(self) -> None:
        """Lose the memory, as a restart does."""
        self.context = Context(
            run_id=1,
            node_id=self.node_id,
            node_config=self.config,
            state=RecordDict(),
            run_config={},
        )

    def answer(self, message: Message) -> Message:
        return self.app(message, self.context)


class FakeGrid(Grid):
    """Delivers at once; a reply that a fault holds back is never delivered."""

    def __init__(self, nodes: Iterable[FakeNode]) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # as a server app has
        self.nodes = list(nodes)
        self.replies: dict[str, Message] = {}
        self.now = 0.0
        self.log: list[tuple[str, int]] = []  # kind, node

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> float:
        return self.now

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self) -> list[Any]:
        return [node for node in self.nodes if node.online]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            ids.append(message.metadata.message_id)
            node = self._node(message.metadata.dst_node_id)
            kind = message.metadata.message_type
            node.asked.append(kind)
            self.log.append((kind, node.node_id))
            fault = node.fault(message)
            if fault == "silent":
                continue
            if isinstance(fault, int):
                reply = Message(Error(fault, "made up"), reply_to=message)
            elif isinstance(fault, Message):
                reply = fault
            else:
                reply = node.answer(message)
            self.replies[message.metadata.message_id] = reply
        return ids

    def _node(self, node_id: int) -> FakeNode:
        return next(node for node in self.nodes if node.node_id == node_id)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(i) for i in list(message_ids) if i in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: Any = None
    ) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))
