"""Checks of what a user's own code hands over: methods, choices, states, metrics.

Our own methods pass through them too, since a selector or an aggregator may come from anywhere.
Every failure is a `UserError` that names the class and says what to return instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedglimpse.errors import UserError
from fedglimpse.federation import reports as catalogue
from fedglimpse.plugins import has_values
from fedglimpse.types import (
    RECORD_FIELDS,
    Aggregator,
    Choice,
    LocalObjective,
    Method,
    Update,
    View,
)

LARGEST_WEIGHT = 1e6  # of an update; the weights of a mean add up to 1
WHOLE_NUMBERS = (torch.int64, torch.int32)
OURS = "fedglimpse."  # how the modules begin whose answers need no check
PLAIN_TYPES = frozenset({bool, int, float, str, type(None)})
COUNTED_METRIC = "server_flops"  # the one measured field a selector may log: it adds to the cost


def kind_of(value: object) -> str:
    """Describe a value that a user's code returned, to be named in a sentence."""
    if isinstance(value, Tensor) and not has_values(value):
        return "a tensor that is sparse or on the device 'meta'"
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


# ---- A method, before the first round.


def check_method(method: Method) -> None:
    """Raise UserError for a method that cannot be run, neither simulated nor on devices."""
    selector = method.selector
    objective = method.objective
    _check_attributes(selector, ("needs", "learns_from"), ("select", "feedback"))
    _check_attributes(method.aggregator, ("needs",), ("starts", "step"))
    if not hasattr(method.aggregator, "applied"):
        raise UserError(
            f"{type(method.aggregator).__name__} has no attribute applied: add applied = None, or "
            "inherit from fedglimpse.WeightedDelta."
        )
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


def _check_attributes(
    plugin: object, name_sets: tuple[str, ...], functions: tuple[str, ...]
) -> None:
    """Raise UserError where a selector or an aggregator lacks what every round uses."""
    if isinstance(plugin, type):
        raise UserError(
            f"The method was given the class {plugin.__name__}, not an object of it: write "
            f"{plugin.__name__}() in Method(...)."
        )
    class_name = type(plugin).__name__
    for attribute in name_sets:
        value = getattr(plugin, attribute, None)
        if not isinstance(value, frozenset):
            exists = hasattr(plugin, attribute)
            problem = f"is a {type(value).__name__}" if exists else "is missing"
            raise UserError(
                f"{class_name}.{attribute} {problem}: make it a frozenset of names, such as "
                "frozenset()."
            )
    for function in (*functions, "state_dict", "load_state_dict"):
        if not callable(getattr(plugin, function, None)):
            raise UserError(
                f"{class_name} has no method {function}(): add it, see fedglimpse.types."
            )


def _check_objective(objective: object) -> None:
    """Raise UserError where an objective is none, or one of its values is not a number."""
    if not isinstance(objective, LocalObjective):
        raise UserError(
            f"The objective of the method is {kind_of(objective)}: give a "
            "fedglimpse.LocalObjective, such as LocalObjective(proximal_mu=0.1)."
        )
    for field, value in vars(objective).items():
        if not isinstance(value, bool | int | float):
            raise UserError(
                f"LocalObjective({field}={value!r}) holds {kind_of(value)}: give a number, or true "
                "or false."
            )


def check_state(plugin: object, state: object) -> None:
    """Raise UserError where `plugin.state_dict()` did not return a dictionary."""
    if not isinstance(state, dict):
        raise UserError(
            f"{type(plugin).__name__}.state_dict() returned {kind_of(state)}: return a dict of "
            "what load_state_dict() needs, {} where that is nothing."
        )
    if _has_meta_tensor(state):
        raise UserError(
            f"{type(plugin).__name__}.state_dict() holds a tensor on the device 'meta', which has "
            "no values to save: return it from a real device."
        )


def _has_meta_tensor(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, dict):
        return any(map(_has_meta_tensor, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_meta_tensor, value))


# ---- What a selector returns.


def check_choice(choice: object, view: View, k: int, selector: object) -> Choice:
    """Return the answer of `selector`; UserError where it is not a legal set of slots."""
    answer = f"{type(selector).__name__}.select answered round {view.round_num} with"
    if not isinstance(choice, Choice):
        raise UserError(f"{answer} {kind_of(choice)}: return fedglimpse.Choice(slots).")
    slots: object = choice.slots  # whatever a user's code returned
    if not isinstance(slots, Tensor):
        raise UserError(f"{answer} slots that are {kind_of(slots)}: use torch.tensor(slots).")
    is_readable = type(selector).__module__.startswith(OURS) or has_values(slots)
    if not is_readable or slots.dtype not in WHOLE_NUMBERS or slots.dim() != 1:
        raise UserError(
            f"{answer} slots that are {kind_of(slots)}: use a row of positions in view.ids, int64."
        )
    positions = slots.tolist()
    num_visible = len(view.ids)
    limit = min(k, num_visible)
    problem = ""
    if not 1 <= len(positions) <= limit:
        problem = f"{len(positions)} slots, but 1 to {limit} are allowed"
    elif len(set(positions)) < len(positions):
        problem = f"slots {positions} with a repetition"
    elif min(positions) < 0 or max(positions) >= num_visible:
        problem = f"slots {positions}, but only 0 to {num_visible - 1} exist"
    if problem:
        raise UserError(f"{answer} {problem}: fix select().")
    if choice.weights is not None:
        _check_weights(choice.weights, len(positions), answer)
    return choice


def _check_weights(weights: object, count: int, answer: str) -> None:
    """Raise UserError where the weights of a choice are not one number for each of its slots."""
    if not isinstance(weights, Tensor):
        raise UserError(f"{answer} weights that are {kind_of(weights)}: use torch.tensor(weights).")
    is_number = weights.dtype != torch.bool and not weights.is_complex()
    if not has_values(weights) or not is_number or weights.dim() != 1:
        raise UserError(
            f"{answer} weights that are {kind_of(weights)}: use a row of floats, one for each slot."
        )
    problem = ""
    if len(weights) != count:
        problem = f"{len(weights)} weights for {count} slots"
    elif not weights.isfinite().all():
        problem = f"weights {weights.tolist()} that are not finite"
    elif float(weights.abs().max()) > LARGEST_WEIGHT:
        problem = f"weights {weights.tolist()}, but at most {LARGEST_WEIGHT:g} is allowed"
    if problem:
        raise UserError(f"{answer} {problem}: fix select().")


def plain_metrics(metrics: object, source: str) -> Mapping[str, Any]:
    """Return what a selector logs as plain values of JSON; UserError where that is impossible.

    Numbers are taken out of tensors and numpy scalars; None means no metrics.

    Args:
        metrics: what the selector returned.
        source: where it comes from, as the beginning of a sentence.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"{source} is {kind_of(metrics)}: give a dict of names and numbers, such as "
            '{"mean_norm": 0.5}, or nothing.'
        )
    plain = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise UserError(f"{source} has the name {name!r}: use words as names.")
        if name in RECORD_FIELDS and name != COUNTED_METRIC:
            raise UserError(
                f"The selector logs '{name}', which is measured: choose another name in "
                "feedback() or Choice.info."
            )
        if type(value) in PLAIN_TYPES:
            plain[name] = value
            continue
        if type(value) is list and PLAIN_TYPES.issuperset(map(type, value)):
            plain[name] = list(value)  # long lists are common, and mostly plain
            continue
        try:
            plain[name] = _plain(value)
        except TypeError as error:
            raise UserError(
                f"{source} holds {error} as '{name}', which no record can: give a number, a word, "
                "or a list of these, such as tensor.tolist()."
            ) from None
    flops = plain.get(COUNTED_METRIC, 0)
    if not isinstance(flops, int | float) or not math.isfinite(flops):
        raise UserError(f"{source} has {COUNTED_METRIC}={flops!r}: give a finite number.")
    return plain


def _plain(value: Any) -> Any:
    """Return a value as JSON represents it; TypeError names its kind where JSON cannot."""
    if isinstance(value, Tensor) and not has_values(value):
        raise TypeError(kind_of(value))
    if isinstance(value, Tensor | np.generic | np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, bool | int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {key: _plain(entry) for key, entry in value.items()}
    raise TypeError(kind_of(value))


# ---- What an aggregator returns.


def checked_starts(aggregator: Aggregator, state: Tensor, ids: Tensor) -> Tensor:
    """Return the states `[n, d]` that these clients train from, as the aggregator says."""
    starts = aggregator.starts(state, ids)
    if type(aggregator).__module__.startswith(OURS):
        return starts
    if not has_values(starts) or starts.shape != (ids.shape[0], state.shape[0]):
        raise UserError(
            f"{type(aggregator).__name__}.starts returned {kind_of(starts)}: "
            f"return one state of {len(state)} floats for each of the {len(ids)} clients."
        )
    return starts


def checked_step(aggregator: Aggregator, state: Tensor, update: Update) -> Tensor:
    """Return the next global state `[d]` of an aggregator; UserError where it is not one."""
    new_state: Any = aggregator.step(state, update)  # whatever a user's code returned
    if type(aggregator).__module__.startswith(OURS):  # finite where updates are
        return cast(Tensor, new_state)
    step = f"{type(aggregator).__name__}.step answered round {update.round_num} with"
    is_tensor = isinstance(new_state, Tensor)
    is_plain = is_tensor and has_values(new_state) and new_state.is_floating_point()
    if not is_plain or new_state.shape != state.shape:
        raise UserError(
            f"{step} {kind_of(new_state)}: return the next global state, a tensor of {len(state)} "
            "floats like the given one."
        )
    if not bool(new_state.isfinite().all()):
        raise UserError(f"{step} numbers that are not finite: fix step().")
    applied: Any = aggregator.applied  # whatever a user's code set
    count = len(update.weights)
    is_row = isinstance(applied, Tensor) and has_values(applied) and applied.shape == (count,)
    if applied is not None and not is_row:
        raise UserError(
            f"{type(aggregator).__name__}.applied is {kind_of(applied)} after round "
            f"{update.round_num}: make it a tensor of the {count} weights that were used, or None."
        )
    if applied is not None and not bool((applied.abs() <= LARGEST_WEIGHT).all()):
        raise UserError(
            f"{type(aggregator).__name__}.applied is {applied.tolist()} after round "
            f"{update.round_num}: make it the weights that were used, finite and at most "
            f"{LARGEST_WEIGHT:g}."
        )
    return cast(Tensor, new_state)
