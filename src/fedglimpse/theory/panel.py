"""The theory panel of a run: the terms of the bound measured at its stored models.

`measure_run` makes a panel from a run folder and writes it to `theory.json`; `read_panel` reads it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.runs.build import build_world
from fedglimpse.runs.folder import CLIENTS, check_draws, stored_config, writing
from fedglimpse.runs.kept_models import kept_models, load_models
from fedglimpse.simulation.world import World
from fedglimpse.storage import store
from fedglimpse.studies.results.run_folder import read_records
from fedglimpse.theory.bound import Constants, QConstants, Terms, lemma_4, printed, repaired
from fedglimpse.theory.estimate import LaneProbe, Measurement, column

FILE = "theory.json"
Record = Mapping[str, Any]  # one line of a run's rounds.jsonl


@dataclass(frozen=True)
class LanePanel:
    """The measured terms of one seed."""

    seed: int
    points: list[Measurement]  # one for each measured model, in order of rounds
    constants: Constants[float]
    q: QConstants[float] | None  # None: no Q-values, or none from which mu > 0 follows
    measured: float  # mean ||grad F||^2, the left-hand side
    accuracy: float  # mean test accuracy over all scored rounds

    @property
    def printed(self) -> Terms[float]:
        """The bound as printed."""
        return printed(self.constants, self.q)

    @property
    def repaired(self) -> Terms[float]:
        """The bound as it can be proved."""
        return repaired(self.constants)

    @property
    def step_condition(self) -> float:
        """L k eta, at most 1 in the theorem."""
        return self.constants.smoothness * self.constants.steps * self.constants.lr

    @property
    def relative_deviation(self) -> float:
        """Mean deviation divided by that of a random choice at the same models."""
        at_random = sum(column(self.points, "random_deviation"))
        if not at_random:
            return 1.0
        return sum(column(self.points, "deviation")) / at_random

    @property
    def lemma_4_by_round(self) -> float | None:
        """Mean of Lemma 4 with each round's own constants; None without mu > 0 in any round."""
        bounds = []
        for point in self.points:
            if point.delta_q is not None and point.mu and point.l_q is not None:
                q = QConstants(point.delta_q, point.mu, point.l_q)
                bounds.append(lemma_4(point.spread, q, point.selected / point.visible))
        return sum(bounds) / len(bounds) if bounds else None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the series over rounds as lists."""
        series = {}
        for measured in fields(Measurement):
            series[measured.name] = column(self.points, measured.name)
        return {
            "seed": self.seed,
            "series": series,
            "constants": asdict(self.constants),
            "q": None if self.q is None else asdict(self.q),
            "measured": self.measured,
            "accuracy": self.accuracy,
            "relative_deviation": self.relative_deviation,
            "step_condition": self.step_condition,
            "lemma_4_by_round": self.lemma_4_by_round,
            "printed": _with_total(self.printed),
            "repaired": _with_total(self.repaired),
        }

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> LanePanel:
        """Return the panel that `to_json` stored."""
        series = stored["series"]
        points = []
        for i in range(len(series["round"])):
            values = {name: of_rounds[i] for name, of_rounds in series.items()}
            points.append(Measurement(**values))
        q = stored["q"]
        return LanePanel(
            seed=stored["seed"],
            points=points,
            constants=Constants(**stored["constants"]),
            q=None if q is None else QConstants(**q),
            measured=stored["measured"],
            accuracy=stored["accuracy"],
        )


def _with_total(terms: Terms[float]) -> dict[str, float]:
    return {**asdict(terms), "total": terms.total}


@dataclass(frozen=True)
class Panel:
    """The measured terms of a run."""

    method: str
    data: str
    notes: Sequence[str]  # what the reader must know before believing the numbers
    lanes: Sequence[LanePanel]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "method": self.method,
            "data": self.data,
            "notes": self.notes,
            "lanes": [lane.to_json() for lane in self.lanes],
        }


def read_panel(run: Path) -> Panel:
    """Read the `theory.json` of a run folder; raises UserError where it is damaged."""
    try:
        stored = json.loads(store.read(run / FILE, "measure the run again, without --reuse"))
        lanes = [LanePanel.from_json(lane) for lane in stored["lanes"]]
        return Panel(stored["method"], stored["data"], stored["notes"], lanes)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{run / FILE} cannot be read ({type(error).__name__}): leave --reuse out to measure "
            "the run again.",
            key="--reuse",
        ) from None


def measure_run(run: Path, max_examples: int = 0) -> Panel:
    """Measure a run folder and write its `theory.json`.

    Args:
        run: a run folder with kept models, or at least a checkpoint.
        max_examples: use at most this many examples of each client; 0: all.

    Raises:
        UserError: where the folder holds no run or one on devices, or no round of it could be
            measured.
    """
    if (run / CLIENTS).exists():
        raise UserError(
            f"{run} holds a run on devices, which cannot be measured, since their data is not "
            "here: name a run of the simulator."
        )
    check_draws(run, "measure it with the code that ran it, or run it again")
    config = stored_config(run, to_run=False)
    world = build_world(config)
    records = _records_by_lane(run, len(world.lanes))
    points = _measure_models(run, world, config, records, max_examples)
    if not all(points):
        raise UserError(
            f"{run} has no stored model of a round in which clients were chosen: run it with "
            "checkpoint.keep_models=10.",
            key="checkpoint.keep_models",
        )
    lanes = []
    for index, lane in enumerate(world.lanes):
        lane_sizes = [int(size) for size in lane.population.sizes]
        lane_records = list(records[index].values())
        panel_of_lane = lane_panel(
            config,
            lane_sizes,
            lane.seed,
            points[index],
            lane_records,
        )
        lanes.append(panel_of_lane)
    has_models = bool(kept_models(run))
    panel = Panel(
        method=config.method,
        data=config.data.name,
        notes=notes_on(config, has_models, max_examples),
        lanes=lanes,
    )
    text = json.dumps(panel.to_json(), indent=1)
    with writing(run):
        store.add(run / FILE, (text + "\n").encode())
    return panel


def _records_by_lane(run: Path, num_lanes: int) -> list[dict[int, Record]]:
    """Return for each lane its records by round."""
    by_lane: list[dict[int, Record]] = [{} for _ in range(num_lanes)]
    for record in read_records(run):
        if record["lane"] < num_lanes:
            by_lane[record["lane"]][record["round"]] = record
    return by_lane


def _measure_models(
    run: Path,
    world: World,
    config: Config,
    records: Sequence[Mapping[int, Record]],
    max_examples: int,
) -> list[list[Measurement]]:
    """Return for each lane the measurements at its stored models, in order of rounds."""
    probes = []
    for lane in world.lanes:
        probe = LaneProbe(
            world.evaluator,
            lane.population,
            lane.seed,
            config.local.lr,
            config.local.batch_size,
            max_examples,
        )
        probes.append(probe)
    points: list[list[Measurement]] = [[] for _ in world.lanes]
    last_round = max(records[0], default=-1)
    for round_num, states in _stored_models(run, world.states, last_round):
        for index, probe in enumerate(probes):
            if round_num in records[index]:
                state = states[index].to(world.states)
                point = probe.measure(state, records[index][round_num])
                if point is not None:
                    points[index].append(point)
    return points


def _stored_models(run: Path, start: Tensor, last_round: int) -> Iterator[tuple[int, Tensor]]:
    """Yield rounds with their states `[R, d]`; without kept models only the first and the last."""
    kept_files = kept_models(run)
    checkpoint = run / "checkpoint.pt"
    if kept_files:
        for round_num, path in kept_files.items():
            yield round_num, load_models(path)
    elif checkpoint.exists() and last_round >= 0:
        yield 0, start
        if last_round > 0:
            yield last_round, _last_states(checkpoint)


def _last_states(path: Path) -> Tensor:
    """Read the states `[R, d]` of a checkpoint."""
    fix = "run it again, with checkpoint.keep_models=10 to need no checkpoint"
    key = "checkpoint.keep_models"
    content = store.unsealed(path, fix, key)
    try:
        saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return torch.stack([lane["state"] for lane in saved["lanes"]])
    except Exception as error:
        raise store.damage(path, type(error).__name__, fix, key) from None


def lane_panel(
    config: Config,
    sizes: Sequence[int],
    seed: int,
    points: Sequence[Measurement],
    records: Sequence[Record],
) -> LanePanel:
    """Summarise one seed: means and largest values, as the theorem asks.

    Args:
        config: of the run.
        sizes: examples of each client.
        seed: of the lane.
        points: what was measured.
        records: of all rounds.
    """
    accuracies: list[float] = []
    for record in records:
        if record["accuracy"] is not None:
            accuracies.append(record["accuracy"])
    constants = Constants(
        rounds=float(len(records)),
        steps=mean(local_steps(size, config) for size in sizes if size),
        lr=config.local.lr,
        start=points[0].loss,  # F* of cross-entropy is at least 0
        gap=mean(column(points, "gap")),
        spread=mean(column(points, "spread")),
        deviation=mean(column(points, "deviation")),
        second_moment=max(column(points, "second_moment")),
        noise=max(column(points, "noise")),
        smoothness=max(column(points, "smoothness")),
        visible=mean(column(points, "visible")),
        ratio=mean(point.selected / point.visible for point in points),
        per_selected=mean(1 / point.selected for point in points),
    )
    return LanePanel(
        seed=seed,
        points=list(points),
        constants=constants,
        q=_q_of_run(points),
        measured=mean(column(points, "gradient")),
        accuracy=mean(accuracies),
    )


def local_steps(size: int, config: Config) -> int:
    """Return k, the gradient steps of a client with `size` examples in one round."""
    full_batches, remainder = divmod(size, config.local.batch_size)
    steps = full_batches + (remainder > 1)  # a last batch of one example is skipped
    return config.local.epochs * steps


def _q_of_run(points: Sequence[Measurement]) -> QConstants[float] | None:
    """Return the mean Delta_Q with the smallest mu and the largest L_Q of all rounds."""
    scored = [point for point in points if point.mu is not None]
    if not scored:
        return None
    mu = min(column(scored, "mu"))
    if mu <= 0:
        return None
    return QConstants(
        delta=mean(column(scored, "delta_q")),
        mu=mu,
        smoothness=max(column(scored, "l_q")),
    )


def notes_on(config: Config, has_models: bool, max_examples: int) -> list[str]:
    """Return where the run departs from the theorem's assumptions, and how it was measured."""
    local = config.local
    notes = []
    if not has_models:
        notes.append(
            "No models were kept: only the first model and the last checkpoint are measured, the "
            "latter with the last round's clients. Run with checkpoint.keep_models=10 for more."
        )
    if max_examples:
        notes.append(
            f"At most {max_examples} examples of each client are used: σ² is that of batches of "
            "these, smaller than that of batches of all."
        )
    if local.optimizer != "sgd" or local.momentum:
        notes.append("Clients do not train by plain SGD, which the theorem assumes.")
    if config.model.norm == "batch":
        notes.append(
            "BatchNorm: gradients use running statistics, training uses those of its batches."
        )
    if local.augment or local.weight_decay:
        notes.append("Augmentation and weight decay are not part of the measured objective.")
    return notes
