"""The client side: a user's model and training, answering the server's five questions.

    app = client_app(make_model, train)                  # your own loop
    app = client_app(make_model, data=load_my_data)      # the library's loop on your data

An update stays on the device between `train.sketch` and `query.upload`. What leaves it are the
reports that the method asked for and, from the chosen, the model; never an exception's text, a
label or an example.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from fedglimpse.errors import UserError
from fedglimpse.federation.state import Layout
from fedglimpse.flower import messages as wire
from fedglimpse.flower.clients import UNKNOWN_SIZE
from fedglimpse.flower.device import (
    OBJECTIVES,
    WITH_DATA,
    WITHOUT_DATA,
    Data,
    Device,
    DeviceTraining,
    Settings,
    Train,
    local_training,
    objective_parts,
)
from fedglimpse.types import LocalObjective

__all__ = ["client_app", "local_training"]

_log = logging.getLogger("fedglimpse")

# Records in Flower's context, which outlives a message: the update that waits for its upload, and
# the round and seed it is of.
_PENDING = "fedglimpse.pending"
_ABOUT = "fedglimpse.about"

_METRICS_SENT = ("num-examples", "train_loss")  # of the metrics of `train`; no others leave
_LOSSES = frozenset({"train_loss", "rms_loss"})  # reports that `train` returns as metrics

Handler = Callable[[Message, Context], RecordDict]


class _CannotServe(Exception):
    """The client answers with a status instead of a result."""

    def __init__(self, status: str, detail: str = "") -> None:
        self.status = status
        self.detail = detail


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
    if train is not None:
        honoured = frozenset(objectives)
    elif data is not None:
        train = local_training(data)
        honoured = OBJECTIVES
    else:
        raise UserError("client_app was given neither train nor data: give one of them.")
    client = _Client(model, train, data, honoured)
    app = ClientApp()
    for kind, handler in client.handlers().items():
        category, action = kind.split(".")
        register: Any = getattr(app, category)
        register(action)(_guarded(handler))
    return app


def _guarded(handler: Handler) -> Callable[[Message, Context], Message]:
    """Return a handler that always answers, and reveals no more of an error than its class."""

    def answer(message: Message, context: Context) -> Message:
        try:
            content = handler(message, context)
        except _CannotServe as refusal:
            info = {"detail": refusal.detail} if refusal.detail else {}
            content = wire.reply(refusal.status, info)
        except Exception as error:
            _log.exception("fedglimpse: %s failed on this client", message.metadata.message_type)
            content = wire.reply(wire.FAILED, {"detail": type(error).__name__})
        return Message(content=content, reply_to=message)

    return answer


class _Client:
    """Answers the five kinds of messages of the server."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        train: Train,
        data: Data | None,
        objectives: frozenset[str],
    ) -> None:
        self.model = model
        self.train = train
        self.data = data
        self.serves = WITHOUT_DATA | objectives
        if data is not None:
            self.serves |= WITH_DATA

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
        config = message.content.config_records["config"]
        settings = {**context.node_config, **config}
        _version_fits(settings)  # if not, the server leaves this client out, by this very answer
        name = settings.get("client-id", settings.get("partition-id", ""))
        info = {"client-id": str(name), "serves": wire.joined(self.serves)}
        size = UNKNOWN_SIZE
        if self.data is not None:
            _, y = self.data(settings)
            size = len(y)
        return wire.reply(wire.OK, info, {"num-examples": size})

    def probe(self, message: Message, context: Context) -> RecordDict:
        """Report at the received model, without training."""
        settings, model = self._opened(message, context)
        arrays = message.content.array_records["arrays"]
        device = Device(model, settings, self.data)
        names = wire.names_in(settings, "needs")
        start = _tensor(arrays, "state")
        gradient = _tensor_if_sent(arrays, "gradient")
        reports = device.probes(names, start, gradient)
        return _reply_with(reports)

    def sketch(self, message: Message, context: Context) -> RecordDict:
        """Train, keep the result for `upload`, and report."""
        settings, training, reports = self._trained(message, context)
        needs = wire.names_in(settings, "needs")
        with_update = wire.names_in(settings, "after") - needs
        pending = {"state": wire.packed(training.state)}
        sent = {}
        for name, value in reports.items():
            if name in with_update:
                pending[name] = wire.packed(value)
            else:
                sent[name] = value
        about = {"round": settings["round"], "seed": settings["seed"]}
        context.state[_PENDING] = ArrayRecord(pending)
        context.state[_ABOUT] = ConfigRecord(about)
        return _reply_with(sent, metrics=_metrics_sent(training))

    def upload(self, message: Message, context: Context) -> RecordDict:
        """Send the update of this round, if the client still holds it."""
        config = message.content.config_records["config"]
        about: Any = context.state.config_records.get(_ABOUT, {})
        same_round = about.get("round") == config["round"]
        same_seed = about.get("seed") == config["seed"]
        if _PENDING not in context.state or not (same_round and same_seed):
            raise _CannotServe(wire.STALE)
        pending = context.state.array_records[_PENDING]
        del context.state[_PENDING]
        return wire.reply(wire.OK, arrays=dict(pending))

    def update(self, message: Message, context: Context) -> RecordDict:
        """Train and send the result at once."""
        _, training, reports = self._trained(message, context)
        return _reply_with(
            reports,
            metrics=_metrics_sent(training),
            arrays={"state": wire.packed(training.state)},
        )

    def _opened(
        self,
        message: Message,
        context: Context,
    ) -> tuple[dict[str, Any], nn.Module]:
        """Return the settings of a request and a new model; refuse what cannot be done."""
        config = message.content.config_records["config"]
        settings: dict[str, Any] = {**context.node_config, **config}
        if not _version_fits(config):
            raise _CannotServe(wire.VERSION_DIFFERS)
        objective = LocalObjective(**wire.section(settings, "objective"))
        needed = _all_reports(settings) | objective_parts(objective)
        missing = needed - self.serves
        if missing:
            raise _CannotServe(wire.UNABLE, wire.joined(missing))
        model = self.model()
        if wire.fingerprint(Layout.of(model)) != settings["model"]:
            raise _CannotServe(wire.MODEL_DIFFERS)
        return settings, model

    def _trained(
        self,
        message: Message,
        context: Context,
    ) -> tuple[Settings, DeviceTraining, dict[str, Tensor]]:
        """Train from the received model; returns all reports of the request."""
        settings, model = self._opened(message, context)
        arrays = message.content.array_records["arrays"]
        start = _tensor(arrays, "state")
        names = _all_reports(settings)
        device = Device(self.model(), settings, self.data)
        gradient = _tensor_if_sent(arrays, "gradient")
        probes = device.probes(names, start, gradient)
        layout = Layout.of(model)
        layout.write(start, model)
        metrics = self.train(model, settings)
        missing = (names & _LOSSES) - metrics.keys()
        if missing:
            raise _CannotServe(wire.UNABLE, wire.joined(missing))
        training = DeviceTraining(
            start=start,
            state=layout.read(model).cpu(),
            metrics=metrics,
        )
        proxy = _tensor_if_sent(arrays, "proxy")
        reports = probes | device.trained(names, training, proxy)
        return settings, training, reports


def _all_reports(settings: Settings) -> frozenset[str]:
    """Return the reports that a request asks for, at once or with the update."""
    return wire.names_in(settings, "needs") | wire.names_in(settings, "after")


def _reply_with(
    reports: Mapping[str, Tensor],
    metrics: Mapping[str, float] | None = None,
    arrays: Mapping[str, Array] | None = None,
) -> RecordDict:
    """Return a reply with reports, besides other metrics and arrays."""
    numbers: dict[str, float] = {}
    tensors: dict[str, Array] = {}
    for name, value in reports.items():
        if value.dim() == 0:
            numbers[name] = float(value)
        else:
            tensors[name] = wire.packed(value)
    return wire.reply(
        wire.OK,
        metrics={**numbers, **(metrics or {})},
        arrays={**(arrays or {}), **tensors},
    )


def _version_fits(config: Mapping[str, Any]) -> bool:
    """Check the server's version, and log it where it does not fit this client's."""
    sentence = wire.version_mismatch("The server", str(config["version"]))
    if sentence is not None:
        _log.error("fedglimpse: %s", sentence)
    return sentence is None


def _tensor(arrays: ArrayRecord, name: str) -> Tensor:
    """Return an array of a request as a tensor that can be written to."""
    return torch.from_numpy(arrays[name].numpy().copy())


def _tensor_if_sent(arrays: ArrayRecord, name: str) -> Tensor | None:
    return _tensor(arrays, name) if name in arrays else None


def _metrics_sent(training: DeviceTraining) -> dict[str, float]:
    """Return what may leave the client of the metrics of its training."""
    sent: dict[str, float] = {}
    for name in _METRICS_SENT:
        if name in training.metrics:
            sent[name] = float(training.metrics[name])
    return sent
