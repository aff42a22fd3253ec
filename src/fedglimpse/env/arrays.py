"""Between lanes and numbers: looks as padded arrays, actions as chosen slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedglimpse.agent.inputs import finite
from fedglimpse.env.stepper import LaneStepper, Look, Step
from fedglimpse.errors import UserError
from fedglimpse.federation.visibility import MobileServer, Overlapping
from fedglimpse.methods.base import top_slots
from fedglimpse.types import View, Visibility

Array = npt.NDArray[Any]
Observation = dict[str, Array]


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
        config, dataset = stepper.settings.config, stepper.parts.dataset
        lane = stepper.world.lanes[0]
        widths = {"sketch": config.sketch.size, "delta_sketch": config.sketch.size}
        widths["label_histogram"] = dataset.num_classes
        columns, at = {}, 0
        for name in stepper.settings.reports:
            columns[name] = slice(at, at + widths.get(name, 1))
            at = columns[name].stop
        return Shape(
            clients=lane.population.num_clients,
            slots=most_visible(lane.visibility, lane.population.num_clients),
            columns=columns,
            features=at,
            largest=len(dataset.y_train),
            history=config.agent.history + 1,
            sketch=config.sketch.size,
            classes=dataset.num_classes,
            histogram="proxy_histogram" in stepper.settings.needs,
        )


def most_visible(visibility: Visibility, num_clients: int) -> int:
    """Return the most clients a pattern can show in one round."""
    if isinstance(visibility, MobileServer):
        visibility = visibility.places
    if isinstance(visibility, Overlapping):
        return max(len(visibility.cluster(0, i)) for i in range(visibility.num_clusters))
    return num_clients


def observations(looks: Sequence[Look], shape: Shape) -> Observation:
    """Return what R lanes see as padded arrays with R rows; see docs/environment.md."""
    rows = len(looks)
    arrays: Observation = {
        "ids": np.zeros((rows, shape.slots), np.int64),
        "sizes": np.zeros((rows, shape.slots), np.int64),
        "mask": np.zeros((rows, shape.slots), np.int8),
        "history": _finite(np.stack([look.history.numpy() for look in looks])),
        "history_mask": np.stack([look.history_mask.numpy() for look in looks]).astype(np.int8),
    }
    if shape.features:
        arrays["clients"] = np.zeros((rows, shape.slots, shape.features), np.float32)
    if shape.histogram:
        arrays["proxy_histogram"] = np.zeros((rows, shape.classes), np.float32)
    for r, look in enumerate(looks):
        if look.view is not None:
            _fill(arrays, r, look.view, shape)
    if shape.features:
        arrays["clients"] = _finite(arrays["clients"])
    return arrays


def _fill(arrays: Observation, r: int, view: View, shape: Shape) -> None:
    count = view.num_visible
    arrays["ids"][r, :count] = view.ids.numpy()
    arrays["sizes"][r, :count] = view.sizes.numpy()
    arrays["mask"][r, :count] = 1
    for name, place in shape.columns.items():
        arrays["clients"][r, :count, place] = view.reports[name].numpy().reshape(count, -1)
    if shape.histogram:
        arrays["proxy_histogram"][r] = view.server["proxy_histogram"].numpy()


def _finite(values: Array) -> Array:
    return finite(torch.from_numpy(values)).numpy()


def slots_of(action: Array, look: Look, k: int, subset: bool) -> Tensor | None:
    """Turn an action `[S]` into at most `k` slots; None where nobody is visible.

    Scores: the `k` best visible slots, best first. A subset: its visible members; of too many,
    `k` are drawn, and too few are filled up by drawing from the other visible slots. Equal scores
    are ordered at random. All draws come from the seed and the round.
    """
    if look.view is None:
        return None
    visible = look.view.num_visible
    scores = np.asarray(action)[:visible].astype(np.float64)
    if len(scores) < visible:
        raise UserError(
            f"The action has {len(scores)} entries, but {visible} clients are "
            "visible: give one entry for each slot."
        )
    if np.isnan(scores).any():
        raise UserError("The action holds NaN for a visible slot: give it a number.")
    return top_slots(torch.from_numpy(scores > 0 if subset else scores), k, look.view.rng)


def info_of(look: Look, step: Step | None) -> dict[str, Any]:
    """Return what goes along with an observation; `step` is the round that led to it."""
    info: dict[str, Any] = {"seed": look.seed, "round": look.round_num}
    if step is None:
        return info
    outcome = step.outcome
    classes = len(step.reward_per_class)
    info |= {
        "record": step.record,
        "played": outcome is not None,
        "score": 0.0 if outcome is None else outcome.score,
        "per_class": np.zeros(classes, np.float32),
        "reward_per_class": step.reward_per_class.numpy().copy(),
    }
    if outcome is not None:
        info["per_class"] = outcome.per_class.numpy().copy()
    return info
