"""One federation among those that run side by side, and what it does in a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedglimpse.data.population import Population
from fedglimpse.errors import UserError
from fedglimpse.federation import reports as catalogue
from fedglimpse.federation.costs import Activity
from fedglimpse.simulation.evaluation import Reward
from fedglimpse.simulation.trained_clients import TrainedClients
from fedglimpse.types import Choice, LocalObjective, Method, View, Visibility

LARGEST_WEIGHT = 1e6  # of an update; those of a mean add up to 1


@dataclass(eq=False)  # compared by identity
class Lane:
    """One federation: its clients, who can be seen, and the method that runs it."""

    seed: int
    population: Population
    visibility: Visibility
    method: Method
    reward: Reward
    k: int
    min_visible: int = 1  # rounds with fewer visible clients pass without training
    round_num: int = 0  # rounds played
    visits: int = 0  # clients that trained in all of them

    @property
    def needs_after(self) -> frozenset[str]:
        """Reports that only the chosen clients send."""
        return self.method.selector.learns_from | self.method.aggregator.needs

    @property
    def trains_first(self) -> bool:
        """True where all visible clients train before the choice."""
        return catalogue.trains_before_choice(self.method.selector.needs)

    @property
    def oracle(self) -> bool:
        """True where the method is shown what no server may know."""
        private = catalogue.ORACLES
        return not private.isdisjoint(self.method.selector.needs | self.needs_after)


@dataclass
class LaneRound:
    """What one lane has seen and done in the current round."""

    visible: list[int]  # all visible, also clients without data or whose update was refused
    examples: dict[int, int]  # how many each of the visible holds
    ids: Tensor  # [V] those that can be chosen
    sizes: Tensor  # [V] how many examples they hold
    idle: bool  # too few are visible: the round passes without training
    clients: TrainedClients | None = None  # of `ids`, where they train before the choice
    view: View | None = None
    trained: list[int] = field(default_factory=list)  # ids that trained
    rejected: list[int] = field(default_factory=list)  # ids whose update was not finite
    selected: list[int] = field(default_factory=list)  # ids whose update was used
    weights: list[float] = field(default_factory=list)
    info: Mapping[str, Any] = field(default_factory=dict)
    train_loss: float | None = None

    @staticmethod
    def begin(lane: Lane) -> LaneRound:
        """See who is there."""
        visible = lane.visibility.visible(lane.seed, lane.round_num)
        ids, sizes = visible, lane.population.sizes[visible]
        names, counts = visible.tolist(), sizes.tolist()
        if not all(counts):
            ids, sizes = visible[sizes > 0], sizes[sizes > 0]
        examples = dict(zip(names, counts, strict=True))
        return LaneRound(names, examples, ids, sizes, idle=ids.shape[0] < lane.min_visible)

    def have_trained(self, clients: TrainedClients, kept: Sequence[int]) -> None:
        """Note what came of training all of `ids`: only those at `kept` can be chosen."""
        if len(kept) < self.ids.shape[0]:
            self.sizes = self.sizes[list(kept)]
        self.clients, self.ids = clients, clients.ids

    def activity(self, lane: Lane, selector_flops: int) -> Activity:
        """Count what the round did; nothing is asked of anyone in a round that passes idle."""
        happened = self.view is not None or bool(self.trained)
        visible = self.visible if happened else []
        return Activity(
            needs=lane.method.selector.needs if happened else frozenset(),
            needs_after=lane.needs_after if self.view is not None else frozenset(),
            visible=len(visible),
            visible_examples=self._examples_of(visible),
            trained=len(self.trained),
            trained_examples=self._examples_of(self.trained),
            chosen=len(self.selected),
            chosen_examples=self._examples_of(self.selected),
            selector_flops=selector_flops,
            taught=lane.method.objective.distill > 0,
        )

    def _examples_of(self, ids: Sequence[int]) -> int:
        return sum(self.examples[i] for i in ids)


@dataclass
class Upload:
    """What the chosen clients of one lane sent in the current round."""

    clients: TrainedClients
    sizes: Tensor  # [K] local examples
    weights: Tensor  # [K] coefficients, float64
    reports: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(clients: TrainedClients, examples: Mapping[int, int], weights: Tensor | None) -> Upload:
        """Put together what chosen clients send and how much it shall count.

        Args:
            clients: the chosen.
            examples: how many each client holds.
            weights: None: by their examples.  # [K]
        """
        sizes = np.array([examples[i] for i in clients.ids.tolist()], dtype=np.int64)
        weights = torch.from_numpy(sizes / sizes.sum()) if weights is None else weights.double()
        return Upload(clients, torch.from_numpy(sizes), weights)


def check_method(method: Method) -> None:
    """Raise UserError for a method that can run nowhere, neither simulated nor on devices."""
    selector, objective = method.selector, method.objective
    _check_parts(method)
    _check_objective(objective)
    catalogue.check(selector.needs | selector.learns_from | method.aggregator.needs)
    if method.schedule not in ("parallel", "sequential"):
        raise UserError(f"schedule={method.schedule!r} is unknown: use 'parallel' or 'sequential'.")
    if method.schedule == "sequential" and catalogue.trains_before_choice(selector.needs):
        names = [n for n in selector.needs if catalogue.CATALOGUE[n].phase == "trained"]
        raise UserError(
            f"A sequential method trains after the choice, but its selector needs "
            f"{', '.join(sorted(names))} before it: use schedule='parallel', or move them to "
            "learns_from."
        )
    if not 0 <= objective.distill <= 1 or objective.temperature <= 0:
        raise UserError(
            f"distill={objective.distill} with temperature={objective.temperature}: use a share "
            "in [0, 1] and a temperature greater than 0."
        )


def _check_parts(method: Method) -> None:
    """Raise UserError where a selector or an aggregator lacks what every round uses."""
    for part, sets, calls in (
        (method.selector, ("needs", "learns_from"), ("select", "feedback")),
        (method.aggregator, ("needs",), ("starts", "step")),
    ):
        if isinstance(part, type):
            raise UserError(
                f"The method was given the class {part.__name__}, not an object of it: write "
                f"{part.__name__}() in Method(...)."
            )
        name = type(part).__name__
        for word in sets:
            value = getattr(part, word, None)
            if not isinstance(value, frozenset):
                found = f"is a {type(value).__name__}" if hasattr(part, word) else "is missing"
                raise UserError(
                    f"{name}.{word} {found}: make it a frozenset of names, such as frozenset()."
                )
        for word in (*calls, "state_dict", "load_state_dict"):
            if not callable(getattr(part, word, None)):
                raise UserError(f"{name} has no method {word}(): add it, see fedglimpse.types.")
    if not hasattr(method.aggregator, "applied"):
        raise UserError(
            f"{type(method.aggregator).__name__} has no attribute applied: add applied = None, or "
            "inherit from fedglimpse.WeightedDelta."
        )


def _check_objective(objective: object) -> None:
    """Raise UserError where an objective is none, or one of its numbers is something else."""
    if not isinstance(objective, LocalObjective):
        raise UserError(
            f"The objective of the method is {kind_of(objective)}: give a "
            "fedglimpse.LocalObjective, such as LocalObjective(proximal_mu=0.1)."
        )
    for word, value in vars(objective).items():
        if not isinstance(value, bool | int | float):
            raise UserError(
                f"LocalObjective({word}={value!r}) holds {kind_of(value)}: give a number, or true "
                "or false."
            )


def check_state(part: object, state: object) -> None:
    """Raise UserError where what `part.state_dict()` returned is no state to continue from."""
    if not isinstance(state, dict):
        raise UserError(
            f"{type(part).__name__}.state_dict() returned {kind_of(state)}: return a dict of what "
            "load_state_dict() needs, {} where that is nothing."
        )


def check_choice(choice: object, view: View, k: int, selector: object) -> Choice:
    """Return the answer of `selector`; UserError where it is not a legal set of slots."""
    who = f"{type(selector).__name__}.select answered round {view.round_num} with"
    if not isinstance(choice, Choice):
        raise UserError(f"{who} {kind_of(choice)}: return fedglimpse.Choice(slots).")
    if problem := _not_tensors(choice):
        raise UserError(f"{who} {problem}.")
    slots, limit = choice.slots.tolist(), min(k, view.num_visible)
    if not 1 <= len(slots) <= limit:
        problem = f"{len(slots)} slots, but 1 to {limit} are allowed"
    elif len(set(slots)) < len(slots):
        problem = f"slots {slots} with a repetition"
    elif min(slots) < 0 or max(slots) >= view.num_visible:
        problem = f"slots {slots}, but only 0 to {view.num_visible - 1} exist"
    elif choice.weights is not None and choice.weights.shape != choice.slots.shape:
        problem = f"{len(choice.weights)} weights for {len(slots)} slots"
    elif choice.weights is not None and not choice.weights.isfinite().all():
        problem = f"weights {choice.weights.tolist()} that are not finite"
    elif choice.weights is not None and float(choice.weights.abs().max()) > LARGEST_WEIGHT:
        problem = f"weights {choice.weights.tolist()}, but at most {LARGEST_WEIGHT:g} is allowed"
    else:
        return choice
    raise UserError(f"{who} {problem}: mend select().")


def _not_tensors(choice: Choice) -> str:
    """Say what in a choice is not a row of numbers, and what is wanted."""
    slots, weights = choice.slots, choice.weights
    if not isinstance(slots, Tensor):
        return f"slots that are {kind_of(slots)}: use torch.tensor(slots)"
    if slots.dtype not in (torch.int64, torch.int32) or slots.dim() != 1:
        return f"slots that are {kind_of(slots)}: use a row of positions in view.ids, int64"
    if weights is None:
        return ""
    if not isinstance(weights, Tensor):
        return f"weights that are {kind_of(weights)}: use torch.tensor(weights)"
    if weights.dtype == torch.bool or weights.dim() != 1:
        return f"weights that are {kind_of(weights)}: use a row of floats, one for each slot"
    return ""


def kind_of(value: object) -> str:
    """Say what kind of thing a user's code returned, to be named in a sentence."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
