"""What agents exchange with an environment, as numpy arrays: observations, actions and infos.

A lane sees a `View` with as many rows as clients are visible; agents expect arrays of a fixed size.
Visible clients fill the first slots of an observation, the other slots are zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedglimpse.agent.inputs import finite
from fedglimpse.env.stepper import LaneObservation, LaneStepper, StepResult
from fedglimpse.errors import require
from fedglimpse.federation.visibility import most_visible
from fedglimpse.methods.base import top_slots
from fedglimpse.types import View

Array = npt.NDArray[Any]
Observation = dict[str, Array]
FLAT_LIMIT = 10.0  # scaled values of a flat observation are clipped to this


@dataclass(frozen=True)
class Shape:
    """The sizes of an observation."""

    clients: int  # N
    slots: int  # S, the most clients that can be visible at once
    columns: Mapping[str, slice]  # report -> its columns of `clients`
    features: int  # F, all columns
    largest: int  # the largest number of local examples a client could have
    history: int  # H+1
    sketch: int  # D
    classes: int  # C
    histogram: bool  # the observation holds the proxy histogram

    @staticmethod
    def of(stepper: LaneStepper) -> Shape:
        """Work out the sizes of a stepper's observations."""
        config = stepper.settings.config
        dataset = stepper.setup.dataset
        lane = stepper.world.lanes[0]
        widths = {
            "sketch": config.sketch.size,
            "delta_sketch": config.sketch.size,
            "label_histogram": dataset.num_classes,
        }
        columns = {}
        num_columns = 0
        for name in stepper.settings.reports:
            width = widths.get(name, 1)
            end = num_columns + width
            columns[name] = slice(num_columns, end)
            num_columns = end
        num_clients = lane.population.num_clients
        return Shape(
            clients=num_clients,
            slots=most_visible(lane.visibility, num_clients),
            columns=columns,
            features=num_columns,
            largest=len(dataset.y_train),
            history=config.agent.history + 1,
            sketch=config.sketch.size,
            classes=dataset.num_classes,
            histogram="proxy_histogram" in stepper.settings.needs,
        )


def as_arrays(lanes: Sequence[LaneObservation], shape: Shape) -> Observation:
    """Return what R lanes see as padded arrays with R rows; see docs/environment.md."""
    num_lanes = len(lanes)
    histories = []
    history_masks = []
    for lane in lanes:
        histories.append(lane.history.numpy())
        history_masks.append(lane.history_mask.numpy())
    per_slot = (num_lanes, shape.slots)
    observation: Observation = {
        "ids": np.zeros(per_slot, np.int64),
        "sizes": np.zeros(per_slot, np.int64),
        "mask": np.zeros(per_slot, np.int8),
        "history": _finite(np.stack(histories)),
        "history_mask": np.stack(history_masks).astype(np.int8),
    }
    if shape.features:
        observation["clients"] = np.zeros((*per_slot, shape.features), np.float32)
    if shape.histogram:
        observation["proxy_histogram"] = np.zeros((num_lanes, shape.classes), np.float32)
    for index, lane in enumerate(lanes):
        if lane.view is not None:
            _fill(observation, index, lane.view, shape)
    if shape.features:
        observation["clients"] = _finite(observation["clients"])
    return observation


def _fill(observation: Observation, index: int, view: View, shape: Shape) -> None:
    """Write what one lane sees into its row."""
    count = view.num_visible  # visible clients fill the first slots
    observation["ids"][index, :count] = view.ids.numpy()
    observation["sizes"][index, :count] = view.sizes.numpy()
    observation["mask"][index, :count] = 1
    for name, columns in shape.columns.items():
        report = view.reports[name].numpy()
        observation["clients"][index, :count, columns] = report.reshape(count, -1)
    if shape.histogram:
        histogram = view.server["proxy_histogram"]
        observation["proxy_histogram"][index] = histogram.numpy()


def _finite(values: Array) -> Array:
    tensor = torch.from_numpy(values)
    return finite(tensor).numpy()


def flat_size(shape: Shape) -> int:
    """Return the length of a flat observation."""
    per_client = shape.features + 3  # reports, id, size, mask
    per_model = shape.sketch + 1  # sketch, mask
    size = shape.slots * per_client + shape.history * per_model
    if shape.histogram:
        size += shape.classes
    return size


def flatten(observation: Observation, shape: Shape) -> Array:
    """Turn observations with any leading dimensions into rows of scaled numbers `[..., n]`.

    In this order: reports, standardised within the visible set; id / N; size / sum of visible
    sizes; mask; history, divided by its root mean square; history mask; proxy histogram.
    """
    mask = observation["mask"].astype(np.float32)  # [..., S]
    sizes = observation["sizes"]
    total_size = np.maximum(sizes.sum(-1, keepdims=True), 1)
    history = _scaled_history(observation, shape)
    blocks = [
        mask * observation["ids"] / shape.clients,
        sizes / total_size,
        mask,
        _join_last_two(history),
        observation["history_mask"],
    ]
    if shape.features:
        reports = _standardise(observation["clients"], mask[..., None])
        blocks.insert(0, _join_last_two(reports))
    if shape.histogram:
        blocks.append(observation["proxy_histogram"])
    columns = [block.astype(np.float32) for block in blocks]
    return np.concatenate(columns, axis=-1)


def _scaled_history(observation: Observation, shape: Shape) -> Array:
    """Divide the sketches `[..., H+1, D]` by the root mean square of those that exist."""
    mask = observation["history_mask"][..., None].astype(np.float32)  # [..., H+1, 1]
    sketches = observation["history"] * mask
    num_floats = mask.sum((-2, -1), keepdims=True) * shape.sketch
    total = np.square(sketches).sum((-2, -1), keepdims=True)
    mean_square = total / np.maximum(num_floats, 1)
    scaled = sketches / np.sqrt(mean_square + 1e-12)
    return np.clip(scaled, -FLAT_LIMIT, FLAT_LIMIT)


def _standardise(rows: Array, mask: Array) -> Array:
    """Z-score columns of `[..., S, F]` over the visible slots; others are 0."""
    count = np.maximum(mask.sum(-2, keepdims=True), 1)
    mean = (rows * mask).sum(-2, keepdims=True) / count
    centred = (rows - mean) * mask
    variance = np.square(centred).sum(-2, keepdims=True) / count
    scaled = centred / (np.sqrt(variance) + 1e-8)
    return np.clip(scaled, -FLAT_LIMIT, FLAT_LIMIT)


def _join_last_two(values: Array) -> Array:
    leading = values.shape[:-2]
    return values.reshape(*leading, -1)


def chosen_slots(
    action: Array,
    lane: LaneObservation,
    k: int,
    subset: bool,
) -> Tensor | None:
    """Turn an action `[S]` into at most `k` slots; None where no client is visible.

    Scores: the `k` best visible slots, best first. A subset: its visible members; of too many,
    `k` are drawn, and too few are filled up by drawing from the other visible slots. Equal scores
    are ordered at random. All draws come from the seed and the round.
    """
    if lane.view is None:
        return None
    visible = lane.view.num_visible
    scores = np.asarray(action)[:visible].astype(np.float64)
    require(
        len(scores) == visible,
        f"The action has {len(scores)} entries, but {visible} clients are visible: give one entry "
        "for each slot.",
    )
    require(
        not np.isnan(scores).any(), "The action holds NaN for a visible slot: give it a number."
    )
    values = scores > 0 if subset else scores
    return top_slots(torch.from_numpy(values), k, lane.view.rng)


def info_of(lane: LaneObservation, step: StepResult | None) -> dict[str, Any]:
    """Return the info that goes with an observation.

    Args:
        lane: the observation.
        step: the round that led to it; None at the start of an episode.
    """
    info: dict[str, Any] = {"seed": lane.seed, "round": lane.round_num}
    if step is None:
        return info
    outcome = step.outcome
    info["record"] = step.record
    info["played"] = outcome is not None
    info["score"] = 0.0
    info["per_class"] = np.zeros(len(step.reward_per_class), np.float32)
    info["reward_per_class"] = step.reward_per_class.numpy().copy()
    if outcome is not None:
        info["score"] = outcome.score
        info["per_class"] = outcome.per_class.numpy().copy()
    return info
