"""Metrics of a run while it goes on, for experiment trackers such as TensorBoard.

A tracker is a `Sink`: it takes the metrics of one seed, round by round. `log.tensorboard=true` is
built in; `log.own=package.module:name` adds any other (`examples/log_to_wandb.py` and
`examples/log_to_mlflow.py` are two). A tracker that fails is dropped with a message on stderr, and
the run goes on: its own records do not depend on it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.plugins import load_callable
from fedglimpse.runs.folder import write_atomically

NOT_METRICS = ("lane", "seed", "round")


class Sink(Protocol):
    """Takes the metrics of one seed of one run."""

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a round."""

    def close(self, finished: bool) -> None:
        """The run has ended; unless it is `finished`, it may be resumed later."""


@dataclass(frozen=True)
class Source:
    """The run and seed that a sink follows."""

    config: Config
    seed: int
    path: Path | None  # the run folder
    done: int  # rounds finished before; above 0 when a run is resumed

    @property
    def name(self) -> str:
        """A name for people to recognise the run by."""
        label = f"{self.config.method}, seed {self.seed}"
        return label if self.path is None else f"{self.path.name}, {label}"

    def tracker_id(self, tracker: str, new_id: Callable[[], str]) -> str:
        """Return the id of this run in a tracker, kept in live.json of the run folder.

        Args:
            tracker: a name of the tracker.
            new_id: called for a run that does not resume one with an id.
        """
        if self.path is None:
            return new_id()
        file = self.path / "live.json"
        ids: dict[str, str] = {}
        if file.exists():
            ids = json.loads(file.read_text(encoding="utf-8"))
        key = f"{tracker}, seed {self.seed}"
        if not self.done or key not in ids:
            ids[key] = new_id()
            write_atomically(file, json.dumps(ids, indent=1))
        return ids[key]


class TensorBoard:
    """Event files in the run folder, for `tensorboard --logdir FOLDER`."""

    def __init__(self, source: Source) -> None:
        """Open the event file of a seed; points of rounds that will run again are dropped."""
        from torch.utils.tensorboard import SummaryWriter

        if source.path is None:
            raise UserError(
                "log.tensorboard=true needs a run folder: choose one with --out.",
                key="log.tensorboard",
            )
        folder = source.path / "tensorboard" / f"seed-{source.seed}"
        purge = source.done if source.done else None
        self.writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, round_num)

    def close(self, finished: bool) -> None:
        """Write what is still in memory."""
        self.writer.close()


class LiveLog:
    """Passes every round of one run to the trackers of `log.*`."""

    def __init__(self, config: Config, path: Path | None) -> None:
        """Check that the trackers are installed; nothing is opened yet.

        Raises:
            UserError: for a tracker that is not installed.
        """
        self.config = config
        self.path = path
        self.rounds_done = 0
        self.rounds_total = 0
        self.openers = _openers(config)
        self.sinks: dict[int, list[Sink]] = {}  # by seed

    def begin(self, name: str, done: int, total: int) -> None:
        """Open the trackers."""
        self.rounds_done = done
        self.rounds_total = total
        if self.openers:
            for seed in self.config.seeds:
                self.sinks[seed] = self._open(Source(self.config, seed, self.path, done))

    def _open(self, source: Source) -> list[Sink]:
        sinks = []
        for opener in self.openers:
            try:
                sinks.append(opener(source))
            except UserError:
                raise
            except Exception as error:
                _warn(f"A tracker of log.* was dropped: {_first_line(error)}")
        return sinks

    def round(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Pass on the metrics of a round, one record for each seed."""
        for record in records:
            metrics = metrics_of(record)
            sinks = self.sinks.get(record["seed"], [])
            for sink in list(sinks):
                try:
                    sink.write(record["round"], metrics)
                except Exception as error:
                    sinks.remove(sink)
                    _warn(f"{type(sink).__name__} was dropped: {error}")
            self.rounds_done = record["round"] + 1

    def end(self) -> None:
        """Close the trackers."""
        finished = self.rounds_done >= self.rounds_total
        for sinks in self.sinks.values():
            for sink in sinks:
                try:
                    sink.close(finished)
                except Exception as error:
                    _warn(f"{type(sink).__name__} did not close: {error}")
        self.sinks = {}


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by name."""
    metrics = {}
    for name, value in record.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name not in NOT_METRICS and math.isfinite(value):
            metrics[name] = float(value)
    return metrics


def _openers(config: Config) -> list[Callable[[Source], Sink]]:
    openers: list[Callable[[Source], Sink]] = []
    if config.log.tensorboard:
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError(
                "log.tensorboard=true needs the package tensorboard, which is not installed: run "
                "pip install tensorboard, or leave log.tensorboard out.",
                key="log.tensorboard",
            )
        openers.append(TensorBoard)
    if config.log.own:
        openers.append(load_callable(config.log.own, "log.own"))
    return openers


def _warn(message: str) -> None:
    print(message, file=sys.stderr)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
