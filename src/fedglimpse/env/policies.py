"""Selectors of the library as policies of the environment: they see only what it shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.env.arrays import Array, Observation, Shape
from fedglimpse.env.settings import Settings
from fedglimpse.errors import UserError
from fedglimpse.types import Choice, Outcome, Selector, View

ALWAYS_SHOWN = frozenset({"global_sketch", "reward"})  # in every observation and every info


class SelectorPolicy:
    """Drives a `ClientSelection` with actions of form "scores" by a selector.

    The view is rebuilt from the observation, and the generator from `info["seed"]` and
    `info["round"]`, the ones a run draws from: an episode equals the run of that seed.
    """

    def __init__(self, selector: Selector, settings: Settings, shape: Shape) -> None:
        """Keep a selector.

        Args:
            selector: its needs have to be among what the environment reports.
            settings: of the environment, `env.unwrapped.stepper.settings`.
            shape: of its observations, `env.unwrapped.shape`.
        """
        shown = settings.needs | ALWAYS_SHOWN
        missing = (selector.needs - shown) | selector.learns_from
        if missing:
            names = ", ".join(sorted(missing))
            raise UserError(
                f"{type(selector).__name__} needs {names}, which the environment does not show: "
                "give its reports these names, or take another selector.",
                key="reports",
            )
        self.selector = selector
        self.shape = shape
        self.k = settings.config.selection.k
        self.choice: Choice | None = None  # of the last `act`; None where no client was visible

    def act(self, observation: Observation, info: Mapping[str, Any]) -> Array:
        """Return scores `[S]` whose best are the selector's choice, in its order."""
        scores = np.zeros(self.shape.slots, np.float32)
        self.choice = None
        view = view_of(observation, info, self.shape)
        if view.num_visible:
            self.choice = self.selector.select(view, self.k)
            if self.choice.weights is not None:
                raise UserError(
                    f"{type(self.selector).__name__} sets weights of its own, which an action "
                    "cannot carry: take a selector that leaves them out."
                )
            slots = self.choice.slots.numpy()
            count = len(slots)
            scores[slots] = 1 - np.arange(count) / (count + 1)
        return scores

    def learn(self, info: Mapping[str, Any]) -> Mapping[str, float]:
        """Give the selector its feedback on the last step; returns what it adds to the record."""
        if not info["played"]:
            return {}
        outcome = outcome_of(info)
        return self.selector.feedback(outcome) or {}


def view_of(observation: Observation, info: Mapping[str, Any], shape: Shape) -> View:
    """Rebuild the view behind an observation; without visible clients, an empty one."""
    count = int(observation["mask"].sum())
    reports = {}
    for name, columns in shape.columns.items():
        rows = _tensor(observation["clients"][:count, columns])
        has_one_column = columns.stop - columns.start == 1
        reports[name] = rows[:, 0] if has_one_column else rows
    newest_sketch = observation["history"][-1]
    server = {"global_sketch": _tensor(newest_sketch)}
    if shape.histogram:
        server["proxy_histogram"] = _tensor(observation["proxy_histogram"])
    return View(
        round_num=info["round"],
        ids=_tensor(observation["ids"][:count]),
        sizes=_tensor(observation["sizes"][:count]),
        reports=reports,
        server=server,
        rng=rng.generator(info["seed"], "select", info["round"]),
    )


def _tensor(values: Array) -> Tensor:
    """Return a tensor of its own: the agent may write to the observation."""
    return torch.from_numpy(values.copy())


def outcome_of(info: Mapping[str, Any]) -> Outcome:
    """Rebuild the result of a round from the info of its step."""
    record = info["record"]
    return Outcome(
        round_num=record["round"],
        selected=torch.tensor(record["selected"], dtype=torch.long),
        reward=record["reward"],
        score=info["score"],
        per_class=torch.from_numpy(info["per_class"]),
        reward_per_class=torch.from_numpy(info["reward_per_class"]),
        weights=torch.tensor(record["weights"], dtype=torch.float32),
        reports={},
    )
