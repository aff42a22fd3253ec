"""The messages of one round: what is sent to whom, and what may be believed of the answers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Array, RecordDict
from torch import Tensor

from fedglimpse.flower import messages as wire
from fedglimpse.flower.checks import Refused, report_of, size_in, tensor_of
from fedglimpse.flower.clients import Federation
from fedglimpse.flower.device import GRADIENTS
from fedglimpse.flower.round_log import Sheet
from fedglimpse.simulation.gradients import mean_gradient
from fedglimpse.simulation.local_training import starts_of


@dataclass(frozen=True)
class Upload:
    """An update that passed all checks."""

    start: Tensor  # [d]
    state: Tensor  # [d]
    reports: dict[str, Tensor]  # of this client, from both phases


class Desk:
    """Asks clients in the name of one round, and notes on its sheet what went wrong."""

    def __init__(self, fed: Federation, sheet: Sheet) -> None:
        """Nobody has been asked yet."""
        self.fed, self.sheet = fed, sheet
        self._starts: dict[int, Tensor] = {}  # [d] what each client trains from
        self._said: dict[int, dict[str, Tensor]] = {}  # reports of the first phase

    def ask_reports(self, kind: str, ids: list[int]) -> dict[int, dict[str, Tensor]]:
        """Ask for the reports before the choice, with training (`SKETCH`) or without (`PROBE`)."""
        plan, trains = self.fed.plan, kind == wire.SKETCH
        if trains:
            self.sheet.trained = list(ids)
        self._start(ids)
        requests = self._requests(ids, plan.now, plan.after if trains else frozenset())
        for client, content in self._exchange(kind, requests).items():
            try:
                self._said[client] = self._read(content, plan.now, client)
            except Refused as why:
                self.sheet.fail(client, str(why), refused=True)
        return self._said

    def ask_updates(
        self, ids: list[int], needs: frozenset[str], start: Tensor | None = None, first: int = 0
    ) -> dict[int, Upload]:
        """Let clients train and upload at once.

        Args:
            ids: of the clients.
            needs: reports that come with the update.
            start: what they train from `[d]`; None: where the aggregator says.
            first: place of the first of them in the round.
        """
        self.sheet.trained += [c for c in ids if c not in self.sheet.trained]
        self._start(ids, start)
        requests = self._requests(ids, needs, frozenset(), first)
        return self._uploads(self._exchange(wire.UPDATE, requests), needs)

    def fetch(self, ids: list[int]) -> dict[int, Upload]:
        """Ask clients that have trained in this round for their updates."""
        config: dict[str, wire.Plain] = {"round": self.sheet.round_num, "seed": self.fed.seed}
        requests = {c: wire.request(config, {}) for c in ids}
        plan = self.fed.plan
        return self._uploads(self._exchange(wire.UPLOAD, requests), plan.after - plan.now)

    def _start(self, ids: list[int], start: Tensor | None = None) -> None:
        """Remember what these clients train from."""
        fed = self.fed
        if start is None:
            at = torch.tensor(ids, dtype=torch.long)
            rows = starts_of(fed.method.aggregator, fed.state.clone(), at)  # [n, d]
        else:
            rows = start.expand(len(ids), -1)
        self._starts |= dict(zip(ids, rows, strict=True))

    def _requests(
        self, ids: list[int], needs: frozenset[str], after: frozenset[str], first: int = 0
    ) -> dict[int, RecordDict]:
        fed = self.fed
        common: dict[str, wire.Plain] = {
            **fed.told,
            **wire.about(fed.config, fed.method.objective, fed.problem.num_classes),
            "round": self.sheet.round_num,
            "model": wire.fingerprint(fed.layout),
            "needs": wire.joined(needs),
            "after": wire.joined(after),
        }
        arrays = self._extras(needs | after)
        packed: dict[int, Array] = {}  # states that several clients start from travel once packed
        requests = {}
        for place, client in enumerate(ids):
            start = self._starts[client]
            if start.data_ptr() not in packed:
                packed[start.data_ptr()] = wire.packed(start)
            visit = fed.visits + first + place
            own: dict[str, wire.Plain] = {"client": client, "visit": visit}
            state = packed[start.data_ptr()]
            requests[client] = wire.request({**common, **own}, {"state": state, **arrays})
        return requests

    def _extras(self, needs: frozenset[str]) -> dict[str, Array]:
        """Return what clients need besides the model."""
        fed, extras = self.fed, {}
        if needs & GRADIENTS:
            gradient = mean_gradient(fed.evaluator, fed.state, *fed.problem.proxy)
            extras["gradient"] = wire.packed(gradient)
        if "proxy_predictions" in needs:
            extras["proxy"] = wire.packed(fed.problem.proxy[0])
        return extras

    def _exchange(self, kind: str, requests: dict[int, RecordDict]) -> dict[int, RecordDict]:
        """Send to clients by their present nodes; returns what came back usable."""
        fed, terms = self.fed, self.fed.terms
        nodes = {c: fed.roster.nodes[c] for c in requests}
        timeout = terms.upload_timeout if kind == wire.UPLOAD else terms.train_timeout
        by_node = {nodes[c]: content for c, content in requests.items()}
        answers = fed.exchange.ask(kind, by_node, timeout, str(self.sheet.round_num))
        contents = {}
        for client, node in nodes.items():
            answer = answers[node]
            self.sheet.received[client] = self.sheet.received.get(client, 0) + answer.bytes
            if answer.content is None:
                self.sheet.fail(client, answer.reason)
            else:
                contents[client] = answer.content
        return contents

    def _uploads(self, contents: dict[int, RecordDict], needs: frozenset[str]) -> dict[int, Upload]:
        uploads = {}
        for client, content in contents.items():
            try:
                arrays: Any = content.array_records.get("arrays", {})
                if "state" not in arrays:
                    raise Refused("no update")
                state = tensor_of(arrays["state"], (self.fed.layout.size,))
                reports = self._said.get(client, {}) | self._read(content, needs, client)
                uploads[client] = Upload(self._starts[client], state, reports)
            except Refused as why:
                self.sheet.fail(client, str(why), refused=True)
        return uploads

    def _read(self, content: RecordDict, needs: frozenset[str], client: int) -> dict[str, Tensor]:
        """Return the reports of a reply, and note its size and loss."""
        sizes = self.fed.roster.sizes
        size = size_in(content, sizes[client])
        if size == 0:
            sizes[client] = 0  # it is greeted again before it gets more work
            raise Refused("no examples")
        reports = {name: report_of(content, name, self._shape(name)) for name in needs}
        sizes[client] = size
        with suppress(Refused):  # a client need not say
            self.sheet.losses[client] = float(report_of(content, "train_loss", ()))
        return reports

    def _shape(self, name: str) -> tuple[int, ...]:
        fed = self.fed
        if name in ("sketch", "delta_sketch"):
            return (fed.config.sketch.size,)
        if name == "proxy_predictions":
            return (len(fed.problem.proxy[1]) * fed.problem.num_classes,)
        return ()
