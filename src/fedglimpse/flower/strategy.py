"""A Flower strategy: an existing app changes its strategy line, and its client.

    strategy = GlimpseStrategy({"method": "glimpse", "data.clients": 10}, problem, out="run")
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=5)

A user's mistake ends in one sentence, as on the command line. Flower treats an exception in a
server app as a failed run and logs its traceback. We still raise, so that the run counts as failed
(after a `SystemExit` the SuperLink would learn nothing, and Flower's simulation would report
success), but a filter on Flower's logger replaces the traceback by the sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError, nearest
from fedglimpse.federation.state import Layout
from fedglimpse.flower.deployment import Problem, ServerTerms
from fedglimpse.flower.messages import section
from fedglimpse.flower.server import FinishedRun, Server, log

__all__ = ["GlimpseStrategy", "Problem", "ServerTerms", "Terms", "from_run_config"]

FLOWER = "flwr"  # Flower's logger

Terms = ServerTerms  # its name in apps of earlier versions


def log_mistakes_plainly() -> None:
    """Let Flower log a UserError without its traceback; a second call changes nothing."""
    logging.getLogger(FLOWER).addFilter(_without_traceback)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Replace what Flower says of a UserError by its sentence; drop no record."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UserError):
        record.msg = "fedglimpse: %s"
        record.args = (str(error),)
        record.exc_info = None
        record.exc_text = None
    return True


def from_run_config(values: Mapping[str, Any]) -> tuple[Config, ServerTerms, Path | None]:
    """Read a Flower app's run configuration; from here on a mistake is one sentence in the log.

    Args:
        values: `fedglimpse.*` holds keys of a configuration, `terms.*` those of `ServerTerms`;
            `seed` and `out` stand alone.

    Returns:
        The configuration, the terms, and the run folder if there is one.
    """
    log_mistakes_plainly()
    seed = values.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"seed={seed!r} must be a whole number, such as 0.", key="seed")
    keys = section(values, "fedglimpse") | {"seeds": [seed]}
    terms = section(values, "terms")
    names = [item.name for item in fields(ServerTerms)]
    for name in terms:
        if name not in names:
            key = f"terms.{name}"
            raise UserError(f"Unknown key '{key}'.{nearest(name, names)}", key=key)
    out = str(values.get("out", ""))
    folder = Path(out).expanduser() if out else None
    return resolve(keys), ServerTerms(**terms), folder


class GlimpseStrategy(Strategy):
    """Runs any method of this library; clients are `fedglimpse.flower.client.client_app`."""

    def __init__(
        self,
        config: Config | Mapping[str, Any],
        problem: Problem,
        terms: ServerTerms | None = None,
        out: Path | str | None = None,
    ) -> None:
        """Describe the run.

        Args:
            config: a `Config`, or dotted keys such as `{"method": "glimpse", "data.clients": 10}`.
            problem: model and the server's examples.
            terms: timeouts and quorum.
            out: the run folder; a run that it already holds is continued.
        """
        log_mistakes_plainly()
        self.config = config if isinstance(config, Config) else resolve(config)
        self.problem = problem
        self.terms = terms
        self.out = out
        self.finished: FinishedRun | None = None  # records and summary, after `start`

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the federation.

        Args:
            grid: of the server app.
            initial_arrays: the initial model's state dict; None: from the run's seed.
            num_rounds: instead of the configuration's `rounds`.
            timeout: seconds for training, instead of `terms.train_timeout`.
            train_config: the user's own settings for `train` on the clients.
            evaluate_config: not used: the server evaluates on its own examples.
            evaluate_fn: called with the final model, after the last round.
        """
        config = self.config
        if num_rounds is not None:
            config = replace(config, rounds=num_rounds)
        terms = self.terms or ServerTerms()
        if timeout is not None:
            terms = replace(terms, train_timeout=timeout)
        model = self.problem.model()
        layout = Layout.of(model)
        start = None
        if initial_arrays is not None:
            _fill(model, initial_arrays)
            start = layout.read(model)
        self.summary()
        user_settings: dict[str, Any] = dict(train_config or {})
        server = Server(config, self.problem, terms, self.out, user_settings)
        self.finished = server.run(grid, start)
        layout.write(self.finished.state, model)
        result = Result(arrays=ArrayRecord(model.state_dict()))
        for record in self.finished.records:
            _add_to_result(result, record)
        if evaluate_fn is not None:  # the user's own evaluation replaces that of the last round
            metrics = evaluate_fn(config.rounds, result.arrays)
            if metrics is not None:
                result.evaluate_metrics_serverapp[config.rounds] = metrics
        return result

    def summary(self) -> None:
        """Log what is going to run."""
        config = self.config
        log.info("method %s, K=%d of N=%d", config.method, config.selection.k, config.data.clients)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not used: `start` has its own loop."""
        _own_loop()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Not used: `start` has its own loop."""
        _own_loop()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not used: the server evaluates on its own examples."""
        _own_loop()

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Not used: the server evaluates on its own examples."""
        _own_loop()


def _add_to_result(result: Result, record: Mapping[str, Any]) -> None:
    """Put a record where Flower's users look; rounds count from 1 there."""
    server_round = record["round"] + 1
    if record["train_loss"] is not None:
        metrics = MetricRecord({"loss": record["train_loss"]})
        result.train_metrics_clientapp[server_round] = metrics
    if record["accuracy"] is not None:
        scores = {name: record[name] for name in ("accuracy", "macro_f1", "loss")}
        result.evaluate_metrics_serverapp[server_round] = MetricRecord(scores)


def _fill(model: nn.Module, arrays: ArrayRecord) -> None:
    """Load a state dict that a user gave, or raise UserError."""
    try:
        model.load_state_dict(arrays.to_torch_state_dict())
    except (RuntimeError, TypeError, ValueError) as error:
        lines = str(error).split("\n", 1)
        reason = " ".join(lines[-1].split())[:200].rstrip(".")  # PyTorch's first line is a heading
        raise UserError(
            f"initial_arrays are not those of problem.model ({reason}): give "
            "ArrayRecord(model.state_dict()) of the same model."
        ) from None


def _own_loop() -> NoReturn:
    raise UserError("GlimpseStrategy runs its own loop: call start().")
