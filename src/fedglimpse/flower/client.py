"""The client side: a user's model and training, answering the server's five questions.

    app = client_app(make_model, train)                  # your own loop
    app = client_app(make_model, data=load_my_data)      # the library's loop on your data

An update stays on the device between `train.sketch` and `query.upload`. What leaves it are the
reports that the method asked for and, from the chosen, the model; never an exception's text, a
label or an example.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedglimpse.errors import UserError
from fedglimpse.federation.state import Layout
from fedglimpse.flower import messages as wire
from fedglimpse.flower.device import (
    ALONE,
    OBJECTIVES,
    WITH_DATA,
    Data,
    Device,
    Settings,
    Train,
    Training,
    asked,
    local_training,
)
from fedglimpse.types import LocalObjective

__all__ = ["client_app", "local_training"]

_log = logging.getLogger("fedglimpse")
_PENDING, _ABOUT = "fedglimpse.pending", "fedglimpse.about"


class _Cannot(Exception):
    """The client answers with a status instead of a result."""

    def __init__(self, status: str, detail: str = "") -> None:
        self.status, self.detail = status, detail


def client_app(
    model: Callable[[], nn.Module],
    train: Train | None = None,
    data: Data | None = None,
    objectives: Iterable[str] = (),
) -> ClientApp:
    """Return the Flower app of a client.

    Args:
        model: builds the model, the same as on the server.
        train: trains a model in place and returns metrics: `num-examples`, and `train_loss` and
            `rms_loss` where methods ask for them. Its second argument holds the node's own
            settings and the server's: `round`, `local.lr`, ... None: the library's own loop.
        data: returns this client's examples and labels; methods that ask for losses or gradients
            need it, and so does the library's own loop.
        objectives: what `train` honours besides its own loss: "proximal", "distill", "blocks".

    Raises:
        UserError: where neither `train` nor `data` is given.
    """
    if train is None and data is None:
        raise UserError("client_app was given neither train nor data: give one of them.")
    honours = OBJECTIVES if train is None else frozenset(objectives)
    if train is None and data is not None:
        train = local_training(data)
    assert train is not None
    client = _Client(model, train, data, honours)
    app = ClientApp()
    for kind, handler in client.handlers().items():
        category, action = kind.split(".")
        register: Any = getattr(app, category)
        register(action)(_guarded(handler))
    return app


Handler = Callable[[Message, Context], RecordDict]


def _guarded(handler: Handler) -> Callable[[Message, Context], Message]:
    """Return a handler that answers always, and tells no more of an error than its class."""

    def answer(message: Message, context: Context) -> Message:
        try:
            content = handler(message, context)
        except _Cannot as no:
            content = wire.reply(no.status, {"detail": no.detail} if no.detail else {})
        except Exception as error:
            _log.exception("fedglimpse: %s failed on this client", message.metadata.message_type)
            content = wire.reply(wire.FAILED, {"detail": type(error).__name__})
        return Message(content=content, reply_to=message)

    return answer


class _Client:
    """The five answers."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        train: Train,
        data: Data | None,
        honours: frozenset[str],
    ) -> None:
        self.model, self.train, self.data = model, train, data
        self.serves = ALONE | honours | (WITH_DATA if data is not None else frozenset())

    def handlers(self) -> dict[str, Handler]:
        """Return the handler of each kind of message."""
        return {
            wire.HELLO: self.hello,
            wire.PROBE: self.probe,
            wire.SKETCH: self.sketch,
            wire.UPLOAD: self.upload,
            wire.UPDATE: self.update,
        }

    def hello(self, message: Message, context: Context) -> RecordDict:
        """Say who this is, how much data it has and what it can do."""
        settings = {**context.node_config, **message.content.config_records["config"]}
        if sentence := wire.mismatch("The server", str(settings["version"])):
            _log.error("fedglimpse: %s", sentence)
        name = settings.get("client-id", settings.get("partition-id", ""))
        info = {"client-id": str(name), "serves": wire.joined(self.serves)}
        size = -1 if self.data is None else len(self.data(settings)[1])
        return wire.reply(wire.OK, info, {"num-examples": size})

    def probe(self, message: Message, context: Context) -> RecordDict:
        """Report at the received model, without training."""
        settings, model = self._opened(message, context)
        arrays = message.content.array_records["arrays"]
        device = Device(model, settings, self.data)
        names = wire.names_in(settings, "needs")
        found = device.probes(names, _tensor(arrays, "state"), _tensor(arrays, "gradient", True))
        return wire.reply(wire.OK, *_split(found))

    def sketch(self, message: Message, context: Context) -> RecordDict:
        """Train, keep the result, report."""
        settings, done, found = self._trained(message, context, "needs")
        later = wire.names_in(settings, "after") - wire.names_in(settings, "needs")
        kept = {n: wire.packed(v) for n, v in found.items() if n in later}
        context.state[_PENDING] = ArrayRecord({"state": wire.packed(done.state), **kept})
        context.state[_ABOUT] = ConfigRecord({"round": settings["round"], "seed": settings["seed"]})
        now = {n: v for n, v in found.items() if n not in later}
        return wire.reply(wire.OK, *_split(now, done.metrics))

    def upload(self, message: Message, context: Context) -> RecordDict:
        """Send the update of this round, if it is still there."""
        config = message.content.config_records["config"]
        have: Any = context.state.config_records.get(_ABOUT, {})
        wanted = (config["round"], config["seed"])
        if _PENDING not in context.state or (have.get("round"), have.get("seed")) != wanted:
            raise _Cannot(wire.STALE)
        kept = context.state.array_records[_PENDING]
        del context.state[_PENDING]
        return wire.reply(wire.OK, arrays=dict(kept))

    def update(self, message: Message, context: Context) -> RecordDict:
        """Train and send the result at once."""
        _, done, found = self._trained(message, context, "needs")
        info, metrics, arrays = _split(found, done.metrics)
        return wire.reply(wire.OK, info, metrics, {"state": wire.packed(done.state), **arrays})

    def _opened(self, message: Message, context: Context) -> tuple[dict[str, Any], nn.Module]:
        """Return the settings of a request and a new model; refuse what cannot be done."""
        config = message.content.config_records["config"]
        settings: dict[str, Any] = {**context.node_config, **config}
        if sentence := wire.mismatch("The server", str(config["version"])):
            _log.error("fedglimpse: %s", sentence)
            raise _Cannot(wire.VERSION_DIFFERS)
        asked_for = wire.names_in(settings, "needs") | wire.names_in(settings, "after")
        wanted = asked_for | asked(LocalObjective(**wire.section(settings, "objective")))
        if missing := wanted - self.serves:
            raise _Cannot(wire.UNABLE, wire.joined(missing))
        model = self.model()
        if wire.fingerprint(Layout.of(model)) != settings["model"]:
            raise _Cannot(wire.MODEL_DIFFERS)
        return settings, model

    def _trained(
        self, message: Message, context: Context, key: str
    ) -> tuple[Settings, Training, dict[str, Tensor]]:
        """Train from the received model; returns all reports of the request."""
        settings, model = self._opened(message, context)
        arrays = message.content.array_records["arrays"]
        layout, start = Layout.of(model), _tensor(arrays, "state")
        assert start is not None
        names = wire.names_in(settings, key) | wire.names_in(settings, "after")
        device = Device(self.model(), settings, self.data)
        found = device.probes(names, start, _tensor(arrays, "gradient", True))
        layout.write(start, model)
        metrics = self.train(model, settings)
        if unsaid := {"train_loss", "rms_loss"} & names - metrics.keys():
            raise _Cannot(wire.UNABLE, wire.joined(frozenset(unsaid)))
        done = Training(start, layout.read(model).cpu(), metrics)
        return settings, done, found | device.trained(names, done, _tensor(arrays, "proxy", True))


def _tensor(arrays: ArrayRecord, name: str, optional: bool = False) -> Any:
    """Return an array of a request as a tensor that can be written to."""
    if optional and name not in arrays:
        return None
    return torch.from_numpy(arrays[name].numpy().copy())


def _split(
    reports: dict[str, Tensor], metrics: Any = None
) -> tuple[dict[str, wire.Plain], dict[str, float], dict[str, Array]]:
    """Sort reports into numbers and arrays; of a training's metrics, only the known ones go."""
    known = {"num-examples", "train_loss"}
    numbers = {n: float(v) for n, v in reports.items() if v.dim() == 0}
    numbers |= {n: float(v) for n, v in (metrics or {}).items() if n in known}
    return {}, numbers, {n: wire.packed(v) for n, v in reports.items() if v.dim() > 0}
