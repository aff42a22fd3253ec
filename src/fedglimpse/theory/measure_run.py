"""From a run folder to its theory panel: rebuild the world, walk over the stored models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from fedglimpse.config.schema import Config
from fedglimpse.data.population import Population
from fedglimpse.errors import UserError
from fedglimpse.runs.build import build_world
from fedglimpse.runs.folder import CLIENTS, stored_config, write_atomically, writing
from fedglimpse.runs.kept_models import kept_models, load_models
from fedglimpse.studies.results.load import read_records
from fedglimpse.theory.bound import Constants, QConstants
from fedglimpse.theory.estimate import Point, Recipe, measure
from fedglimpse.theory.panel import FILE, LanePanel, Panel


def measure_run(run: Path, examples: int = 0) -> Panel:
    """Measure a run folder and write its `theory.json`.

    Args:
        run: a run folder with kept models, or at least a checkpoint.
        examples: use so many examples of each client; 0: all.

    Raises:
        UserError: where the folder holds no run or one on devices, or no round of it could be
            measured.
    """
    if (run / CLIENTS).exists():
        raise UserError(
            f"{run} holds a run on devices, which cannot be measured, since their data is not "
            "here: name a run of the simulator."
        )
    config = stored_config(run, to_run=False)
    world, records = build_world(config), read_records(run)
    mine = [{e["round"]: e for e in records if e["lane"] == r} for r in range(len(world.lanes))]
    recipe = Recipe(config.local.lr, config.local.batch_size, examples)
    points: list[list[Point]] = [[] for _ in world.lanes]
    for round_num, states in _stored(run, world.states, max(mine[0], default=-1)):
        for r, lane in enumerate(world.lanes):
            if round_num not in mine[r]:
                continue
            state, record = states[r].to(world.states), mine[r][round_num]
            point = measure(world.evaluator, lane.population, state, record, recipe, lane.seed)
            points[r] += [] if point is None else [point]
    if not all(points):
        raise UserError(
            f"{run} has no stored model of a round in which clients were chosen: run it with "
            "checkpoint.keep_models=10."
        )
    lanes = [
        lane_panel(config, lane.population, lane.seed, points[r], list(mine[r].values()))
        for r, lane in enumerate(world.lanes)
    ]
    panel = Panel(config.method, config.data.name, notes_on(config, run, examples), lanes)
    with writing(run):
        write_atomically(run / FILE, json.dumps(panel.to_json(), indent=1) + "\n")
    return panel


def lane_panel(
    config: Config,
    population: Population,
    seed: int,
    points: Sequence[Point],
    records: Sequence[Mapping[str, Any]],
) -> LanePanel:
    """Put one seed's points together: means and largest values, as the theorem asks."""
    scored = [record["accuracy"] for record in records if record["accuracy"] is not None]
    constants = Constants(
        rounds=float(len(records)),
        steps=mean(local_steps(int(n), config) for n in population.sizes if n),
        lr=config.local.lr,
        start=points[0].loss,  # F* of cross-entropy is at least 0
        gap=mean(p.gap for p in points),
        spread=mean(p.spread for p in points),
        deviation=mean(p.deviation for p in points),
        second_moment=max(p.second_moment for p in points),
        noise=max(p.noise for p in points),
        smoothness=max(p.smoothness for p in points),
        visible=mean(p.visible for p in points),
        ratio=mean(p.selected / p.visible for p in points),
        per_selected=mean(1 / p.selected for p in points),
    )
    measured = mean(p.gradient for p in points)
    return LanePanel(seed, list(points), constants, _of_q(points), measured, mean(scored))


def local_steps(size: int, config: Config) -> int:
    """Return k, the gradient steps of a client with `size` examples in one round."""
    whole, rest = divmod(size, config.local.batch_size)
    return config.local.epochs * (whole + (rest > 1))


def _of_q(points: Sequence[Point]) -> QConstants[float] | None:
    """Return the mean Delta_Q with the smallest mu and the largest L_Q of all rounds."""
    found = [(p.delta_q, p.mu, p.l_q) for p in points]
    known = [(d, m, s) for d, m, s in found if d is not None and m is not None and s is not None]
    if not known or min(m for _, m, _ in known) <= 0:
        return None
    return QConstants(
        mean(d for d, _, _ in known), min(m for _, m, _ in known), max(s for *_, s in known)
    )


def _stored(run: Path, start: Tensor, last: int) -> Iterator[tuple[int, Tensor]]:
    """Yield rounds with their states `[R, d]`; without kept models only the first and the last."""
    kept = kept_models(run)
    if kept:
        for round_num, path in kept.items():
            yield round_num, load_models(path)
    elif (run / "checkpoint.pt").exists() and last >= 0:
        yield 0, start
        if last > 0:
            yield last, _last_states(run / "checkpoint.pt")


def _last_states(path: Path) -> Tensor:
    """Read the states `[R, d]` of a checkpoint."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        return torch.stack([lane["state"] for lane in saved["lanes"]])
    except Exception as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}): run it again, with "
            "checkpoint.keep_models=10 to need no checkpoint."
        ) from None


def notes_on(config: Config, run: Path, examples: int) -> list[str]:
    """Say where the run is not what the theorem speaks of, and how it was measured."""
    local, notes = config.local, []
    if not kept_models(run):
        notes.append(
            "No models were kept: only the first model and the last checkpoint are measured, the "
            "latter with the last round's clients. Run with checkpoint.keep_models=10 for more."
        )
    if examples:
        notes.append(
            f"At most {examples} examples of each client are used: σ² is that of batches of these, "
            "smaller than that of batches of all."
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
