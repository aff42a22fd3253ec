"""The messages of one round: what each client is sent, and which replies can be used.

Shapes, sizes and numbers of a reply are checked before use: a client is not trusted.
"""

from __future__ import annotations

import io
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, RecordDict
from torch import Tensor

from fedglimpse.flower import messages as wire
from fedglimpse.flower.deployment import Deployment
from fedglimpse.flower.device import GRADIENTS
from fedglimpse.flower.round_log import RoundLog
from fedglimpse.simulation.plugin_checks import checked_starts

_HEADER = 1024  # bytes that numpy's format may add


class Refused(Exception):
    """A reply that is not used; the message is a short reason."""


@dataclass(frozen=True)
class CheckedUpdate:
    """A client's update that passed all checks."""

    start: Tensor  # [d]
    state: Tensor  # [d]
    reports: dict[str, Tensor]  # of this client, from both phases


class ClientRequests:
    """Asks clients on behalf of one round, and notes in its log what went wrong."""

    def __init__(self, deployment: Deployment, log: RoundLog) -> None:
        self.deployment = deployment
        self.log = log
        self._starts: dict[int, Tensor] = {}  # [d] what each client trains from
        self._first_reports: dict[int, dict[str, Tensor]] = {}  # of the phase before the choice

    def ask_reports(self, kind: str, ids: list[int]) -> dict[int, dict[str, Tensor]]:
        """Ask for the reports before the choice, with training (`SKETCH`) or without (`PROBE`)."""
        plan = self.deployment.plan
        with_update: frozenset[str] = frozenset()
        if kind == wire.SKETCH:
            self.log.trained = list(ids)
            with_update = plan.with_update  # computed now, kept on the device for the upload
        self._starts |= self._starts_of(ids)
        requests = self._requests(ids, plan.before_choice, with_update)
        for client, content in self._send(kind, requests).items():
            try:
                reports = self._read_reports(content, plan.before_choice, client)
            except Refused as refusal:
                self.log.fail(client, str(refusal), refused=True)
            else:
                self._first_reports[client] = reports
        return self._first_reports

    def ask_updates(
        self,
        ids: list[int],
        needs: frozenset[str],
        start: Tensor | None = None,
        first: int = 0,
    ) -> dict[int, CheckedUpdate]:
        """Let clients train and upload at once.

        Args:
            ids: of the clients.
            needs: reports that come with the update.
            start: what they train from `[d]`; None: where the aggregator says.
            first: position in the round of the first of them.
        """
        for client in ids:
            if client not in self.log.trained:
                self.log.trained.append(client)
        if start is None:
            self._starts |= self._starts_of(ids)
        else:
            self._starts |= dict.fromkeys(ids, start)
        requests = self._requests(
            ids,
            needs,
            with_update=frozenset(),
            first=first,
        )
        contents = self._send(wire.UPDATE, requests)
        return self._checked_updates(contents, needs)

    def fetch_updates(self, ids: list[int]) -> dict[int, CheckedUpdate]:
        """Ask clients that have trained in this round for their updates."""
        config: dict[str, wire.Plain] = {
            "round": self.log.round_num,
            "seed": self.deployment.seed,
        }
        requests = {client: wire.request(config, {}) for client in ids}
        contents = self._send(wire.UPLOAD, requests)
        plan = self.deployment.plan
        still_needed = plan.with_update - plan.before_choice
        return self._checked_updates(contents, still_needed)

    def _starts_of(self, ids: list[int]) -> dict[int, Tensor]:
        """Return the states that the aggregator lets these clients train from."""
        deployment = self.deployment
        rows = checked_starts(  # [n, d]
            deployment.method.aggregator,
            deployment.state.clone(),
            torch.tensor(ids, dtype=torch.long),
        )
        return dict(zip(ids, rows, strict=True))

    def _requests(
        self,
        ids: list[int],
        needs: frozenset[str],
        with_update: frozenset[str],
        first: int = 0,
    ) -> dict[int, RecordDict]:
        """Return what each client is sent; `first` is the position of the first in the round."""
        deployment = self.deployment
        run_settings = wire.run_settings(
            deployment.config,
            deployment.method.objective,
            deployment.problem.num_classes,
        )
        common: dict[str, wire.Plain] = {
            **deployment.user_settings,
            **run_settings,
            "round": self.log.round_num,
            "model": wire.fingerprint(deployment.layout),
            "needs": wire.joined(needs),
            "after": wire.joined(with_update),
        }
        extra_arrays = self._extra_arrays(needs | with_update)
        packed: dict[int, Array] = {}  # states that several clients start from are packed once
        requests = {}
        for position, client in enumerate(ids, first):
            start = self._starts[client]
            address = start.data_ptr()
            if address not in packed:
                packed[address] = wire.packed(start)
            config = {
                **common,
                "client": client,
                "visit": deployment.visits + position,
            }
            arrays = {"state": packed[address], **extra_arrays}
            requests[client] = wire.request(config, arrays)
        return requests

    def _extra_arrays(self, needs: frozenset[str]) -> dict[str, Array]:
        """Return what clients need besides the model."""
        deployment = self.deployment
        x, y = deployment.problem.proxy
        arrays = {}
        if needs & GRADIENTS:
            gradient = deployment.evaluator.mean_gradient(deployment.state, x, y)
            arrays["gradient"] = wire.packed(gradient)
        if "proxy_predictions" in needs:
            arrays["proxy"] = wire.packed(x)
        return arrays

    def _send(self, kind: str, requests: dict[int, RecordDict]) -> dict[int, RecordDict]:
        """Send to clients at their present nodes; returns the content of those that answered."""
        deployment = self.deployment
        terms = deployment.terms
        timeout = terms.upload_timeout if kind == wire.UPLOAD else terms.train_timeout
        node_of: dict[int, int] = {}
        by_node: dict[int, RecordDict] = {}
        for client, content in requests.items():
            node = deployment.clients.nodes[client]
            node_of[client] = node
            by_node[node] = content
        answers = deployment.exchange.ask(
            kind,
            by_node,
            timeout,
            str(self.log.round_num),
        )
        contents = {}
        for client, node in node_of.items():
            answer = answers[node]
            received_before = self.log.received_bytes.get(client, 0)
            self.log.received_bytes[client] = received_before + answer.bytes
            if answer.content is None:
                self.log.fail(client, answer.reason)
            else:
                contents[client] = answer.content
        return contents

    def _checked_updates(
        self,
        contents: dict[int, RecordDict],
        needs: frozenset[str],
    ) -> dict[int, CheckedUpdate]:
        """Return the updates that can be used, and note why the others cannot."""
        updates = {}
        for client, content in contents.items():
            try:
                updates[client] = self._checked_update(content, needs, client)
            except Refused as refusal:
                self.log.fail(client, str(refusal), refused=True)
        return updates

    def _checked_update(
        self,
        content: RecordDict,
        needs: frozenset[str],
        client: int,
    ) -> CheckedUpdate:
        arrays: Any = content.array_records.get("arrays", {})
        if "state" not in arrays:
            raise Refused("no update")
        shape = (self.deployment.layout.size,)
        state = tensor_of(arrays["state"], shape)
        first_reports = self._first_reports.get(client, {})
        reports = self._read_reports(content, needs, client)
        return CheckedUpdate(
            start=self._starts[client],
            state=state,
            reports=first_reports | reports,
        )

    def _read_reports(
        self,
        content: RecordDict,
        needs: frozenset[str],
        client: int,
    ) -> dict[str, Tensor]:
        """Return the reports of a reply, and note its size and loss."""
        sizes = self.deployment.clients.sizes
        size = size_in(content, sizes[client], self.deployment.terms.max_examples)
        if size == 0:
            sizes[client] = 0  # it is greeted again before it gets more work
            raise Refused("no examples")
        reports = {}
        for name in needs:
            reports[name] = report_of(content, name, self._shape(name))
        sizes[client] = size
        with suppress(Refused):  # a client need not send its loss
            loss = report_of(content, "train_loss", shape=())
            self.log.losses[client] = float(loss)
        return reports

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a report must have."""
        problem = self.deployment.problem
        if name in ("sketch", "delta_sketch"):
            return (self.deployment.config.sketch.size,)
        if name == "proxy_predictions":
            num_proxy = len(problem.proxy[1])
            return (num_proxy * problem.num_classes,)
        return ()


def tensor_of(array: Array, shape: tuple[int, ...]) -> Tensor:
    """Return a client's array as float32, or raise Refused.

    Numpy's own header is read first: nothing is allocated for an unexpected shape.
    """
    floats = math.prod(shape)
    expected_bytes = 4 * floats
    if len(array.data) > expected_bytes + _HEADER:
        raise Refused(f"oversized: {len(array.data)} bytes for {floats} floats")
    try:
        file = io.BytesIO(array.data)
        np.lib.format.read_magic(file)
        sent_shape, _, kind = np.lib.format.read_array_header_1_0(file)
    except Exception:
        raise Refused("unreadable array") from None
    header_bytes = file.tell()
    data_bytes = len(array.data) - header_bytes
    if kind != np.float32 or sent_shape != shape or data_bytes != expected_bytes:
        raise Refused(f"wrong shape: {kind}{list(sent_shape)} instead of float32{list(shape)}")
    values = np.frombuffer(
        array.data,
        np.float32,
        count=floats,
        offset=header_bytes,
    )
    tensor = torch.from_numpy(values.reshape(shape).copy())
    if not tensor.isfinite().all():
        raise Refused("not finite")
    return tensor


def report_of(content: RecordDict, name: str, shape: tuple[int, ...]) -> Tensor:
    """Return one report of a reply, a number or an array, or raise Refused."""
    arrays = content.array_records.get("arrays")
    if arrays is not None and name in arrays:
        return tensor_of(arrays[name], shape)
    metrics = content.metric_records.get("metrics")
    number = None if metrics is None else metrics.get(name)
    if shape or not isinstance(number, int | float):
        raise Refused(f"no {name}")
    value = torch.tensor(float(number), dtype=torch.float32)
    if not value.isfinite():
        raise Refused("not finite")
    return value


def size_in(content: RecordDict, default: int, max_examples: int) -> int:
    """Return the number of local examples in a reply, or `default` where it has no valid one.

    Raises:
        Refused: for a number that the operator does not believe.
    """
    metrics = content.metric_records.get("metrics")
    size = None if metrics is None else metrics.get("num-examples")
    if not isinstance(size, int | float) or not math.isfinite(size):
        return default
    if size > max_examples:
        raise Refused(f"{size:.0f} examples, more than terms.max_examples={max_examples}")
    return int(size) if size >= 0 else default
