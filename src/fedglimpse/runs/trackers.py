"""Metrics of a run while it goes on, for tools that draw them: TensorBoard and its like.

A tool is a `Sink`: something that takes the numbers of one seed, round by round. `log.*` says which
tools are wanted; `log.own=package.module:name` adds one of yours. A tool that breaks is left out
with a word on stderr, and the run goes on: its own records do not depend on it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
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
    """Takes the numbers of one seed of one run."""

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        """Take what was measured in a round."""

    def close(self, finished: bool) -> None:
        """The run has ended; it may be resumed later unless it is `finished`."""


@dataclass(frozen=True)
class Source:
    """Whose numbers a sink takes."""

    config: Config
    seed: int
    path: Path | None  # the run folder
    done: int  # rounds that were played before

    @property
    def name(self) -> str:
        """A name that people recognise."""
        folder = "" if self.path is None else f"{self.path.name}, "
        return f"{folder}{self.config.method}, seed {self.seed}"

    def remembered(self, tool: str, make: Callable[[], str]) -> tuple[str, bool]:
        """Return the id that `tool` knows this run by, and whether it was there before."""
        file = None if self.path is None else self.path / "live.json"
        known = (
            json.loads(file.read_text(encoding="utf-8"))
            if file is not None and file.exists()
            else {}
        )
        key = f"{tool}, seed {self.seed}"
        if key in known and self.done:
            return str(known[key]), True
        known[key] = make()
        if file is not None:
            write_atomically(file, json.dumps(known, indent=1))
        return str(known[key]), False


class TensorBoard:
    """Event files in the run folder: tensorboard --logdir FOLDER."""

    def __init__(self, source: Source) -> None:
        """Open the event file of a seed; rounds that will be played again are dropped."""
        from torch.utils.tensorboard import SummaryWriter

        if source.path is None:
            raise UserError("log.tensorboard=true needs a run folder: give one with --out.")
        folder = source.path / "tensorboard" / f"seed-{source.seed}"
        purge = source.done if source.done else None
        self.writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        """Add a point to every curve."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, round_num)

    def close(self, finished: bool) -> None:
        """Write what is left."""
        self.writer.close()


class WandB:
    """Weights & Biases; WANDB_MODE=offline keeps everything on this machine."""

    def __init__(self, source: Source) -> None:
        """Open a run of project `log.wandb`, or go on with it."""
        import wandb

        name, _ = source.remembered("wandb", wandb.util.generate_id)
        self.run: Any = wandb.init(
            project=source.config.log.wandb,
            name=source.name,
            id=name,
            resume="allow",
            reinit="create_new",
            config=source.config.flat() | {"seed": source.seed},
            dir=None if source.path is None else str(source.path),
        )

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        """Send a round."""
        self.run.log(dict(metrics), step=round_num)

    def close(self, finished: bool) -> None:
        """Send what is left."""
        self.run.finish(quiet=True)


class MLflow:
    """MLflow; MLFLOW_TRACKING_URI says where, such as a server or sqlite:///file.db."""

    def __init__(self, source: Source) -> None:
        """Open a run of experiment `log.mlflow`, or go on with it."""
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.client, self.metric = MlflowClient(), Metric
        wanted = source.config.log.mlflow
        found = self.client.get_experiment_by_name(wanted)
        where = found.experiment_id if found else self.client.create_experiment(wanted)

        def make() -> str:
            return str(self.client.create_run(where, run_name=source.name).info.run_id)

        self.id, known = source.remembered("mlflow", make)
        if known:
            self.client.update_run(self.id, status="RUNNING")
        else:
            values = source.config.flat() | {"seed": source.seed}
            params = [Param(name, str(value)) for name, value in values.items()]
            self.client.log_batch(self.id, params=params)

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        """Send a round."""
        now = int(time.time() * 1000)
        points = [self.metric(name, value, now, round_num) for name, value in metrics.items()]
        self.client.log_batch(self.id, metrics=points)

    def close(self, finished: bool) -> None:
        """Mark the run as over, or as stopped."""
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


class LiveLog:
    """Hands every round of one run to the tools of `log.*`."""

    def __init__(self, config: Config, path: Path | None) -> None:
        """Check that the tools are there; nothing is opened yet.

        Raises:
            UserError: for a tool that is not installed.
        """
        self.config, self.path, self.total = config, path, 0
        self.played = 0
        self.openers = _openers(config)
        self.sinks: dict[int, list[Sink]] = {}  # by seed

    def begin(self, name: str, done: int, total: int) -> None:
        """Open the tools."""
        self.total, self.played = total, done
        for seed in self.config.seeds if self.openers else ():
            source = Source(self.config, seed, self.path, done)
            self.sinks[seed] = []
            for opener in self.openers:
                try:
                    self.sinks[seed].append(opener(source))
                except UserError:
                    raise
                except Exception as error:
                    print(f"A tool of log.* is left out: {_first_line(error)}", file=sys.stderr)

    def round(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Pass on the numbers of a round, one record for each seed."""
        for record in records if self.sinks else ():
            metrics, sinks = numbers(record), self.sinks[record["seed"]]
            for sink in list(sinks):
                try:
                    sink.write(record["round"], metrics)
                except Exception as error:
                    sinks.remove(sink)
                    print(f"{type(sink).__name__} is left out: {error}", file=sys.stderr)
            self.played = record["round"] + 1

    def end(self) -> None:
        """Close the tools."""
        for sink in [sink for sinks in self.sinks.values() for sink in sinks]:
            try:
                sink.close(self.played >= self.total)
            except Exception as error:
                print(f"{type(sink).__name__} did not close: {error}", file=sys.stderr)
        self.sinks = {}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by name."""
    found = {}
    for name, value in record.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and name not in NOT_METRICS and math.isfinite(value):
            found[name] = float(value)
    return found


def _openers(config: Config) -> list[Callable[[Source], Sink]]:
    log = config.log
    tools: list[tuple[str, Any, str, Callable[[Source], Sink]]] = [
        ("tensorboard", log.tensorboard, "tensorboard", TensorBoard),
        ("wandb", log.wandb, "wandb", WandB),
        ("mlflow", log.mlflow, "mlflow", MLflow),
    ]
    for key, wanted, package, _ in tools:
        if wanted and importlib.util.find_spec(package) is None:
            raise UserError(
                f"log.{key}={wanted} needs the package {package}, which is not installed: pip "
                f"install {package}, or leave log.{key} out."
            )
    own = [load_callable(log.own, "log.own")] if log.own else []
    return [opener for _, wanted, _, opener in tools if wanted] + own
