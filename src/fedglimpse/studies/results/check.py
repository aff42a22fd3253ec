"""Is what a file of a study says of the kind it should be? Whatever is not is a ValueError."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from fedglimpse.runs.summary import COSTS
from fedglimpse.studies.results.cell import Cell, Partition, State
from fedglimpse.studies.results.trace import Trace
from fedglimpse.studies.statistics.condense import Climb, Curve, Facts
from fedglimpse.studies.statistics.fairness import Participation

NUMBERS = ("accuracy", "macro_f1", "over_rounds", "best", "reward", "first_tenth", "throughout")


def need(good: bool, name: str, value: object, wanted: str) -> None:
    """Raise ValueError with the name, the value and what it must be, unless it is good."""
    if not good:
        raise ValueError(f"`{name}` is {reprlib.repr(value)}, which must be {wanted}")


def check_head(data: Mapping[str, Any]) -> None:
    """Look at what stands above the cells, in a stored study as in a sweep's plan.

    Of published figures only the kind: a plan's may still be replaced by `--paper`.
    """
    for name in ("title", "claim"):
        need(isinstance(data.get(name, ""), str), name, data.get(name), "a text")
    control, targets, paper = (data.get(name) for name in ("control", "targets", "paper"))
    need(control is None or isinstance(control, str), "control", control, "the name of a variant")
    wanted = "a table of accuracies, setting by setting"
    need(isinstance(targets or {}, dict), "targets", targets, wanted)
    for setting, target in (targets or {}).items():
        good = is_number(target) and 0 < target <= 1
        need(good, f"targets.{setting}", target, "an accuracy in (0, 1]")
    need(paper is None or isinstance(paper, dict), "paper", paper, "a table of published figures")


def check_once(cells: Iterable[Cell]) -> None:
    """Every seed of a variant in a setting must be there once: none may hide another."""
    seen = set()
    for cell in cells:
        name = cell.setting, cell.variant, cell.seed
        if name in seen:
            said = f"setting '{cell.setting}', variant '{cell.variant}', seed {cell.seed}"
            raise ValueError(f"{said} is there twice")
        seen.add(name)


def check_cell(cell: Cell) -> None:
    """Look at a cell of a stored study."""
    for name in ("id", "setting", "variant", "reason"):
        need(isinstance(getattr(cell, name), str), name, getattr(cell, name), "a text")
    need(type(cell.seed) is int, "seed", cell.seed, "a whole number")
    need(cell.state in get_args(State), "state", cell.state, f"one of {get_args(State)}")
    need(isinstance(cell.config, dict), "config", cell.config, "a table")
    if cell.config:
        for name in ("preset", "method", "data.name"):
            value = cell.config.get(name)
            need(isinstance(value, str), f"config.{name}", value, "a text")
        rounds = cell.config.get("rounds")
        need(is_count(rounds), "config.rounds", rounds, "a whole number")
    need(isinstance(cell.environment, dict), "environment", cell.environment, "a table")
    need(cell.theory is None or isinstance(cell.theory, dict), "theory", cell.theory, "a table")
    if cell.facts is not None:
        _check_facts(cell.facts)
    if cell.participation is not None:
        _check_participation(cell.participation)
    if cell.trace is not None:
        _check_trace(cell.trace)


def _check_facts(facts: Facts) -> None:
    for name in NUMBERS:
        value = getattr(facts, name)
        need(value is None or is_number(value), name, value, "a number")
    for name in ("rejected", "seconds", "diverged"):
        need(is_number(getattr(facts, name)), name, getattr(facts, name), "a number")
    curve, climb = facts.curve, facts.climb
    _check_columns("curve", curve, {"accuracy": curve.accuracy, "smooth": curve.smooth})
    _check_columns("climb", climb, {"heights": climb.heights})
    need(is_count(climb.played), "climb.played", climb.played, "a whole number")
    for name in COSTS:
        need(is_number(climb.totals[name]), f"totals.{name}", climb.totals[name], "a number")


def _check_columns(name: str, part: Curve | Climb, more: Mapping[str, Sequence[float]]) -> None:
    """All columns are as long as the column of rounds."""
    columns = {**more, **{cost: part.costs[cost] for cost in COSTS}}
    for key, column in {"rounds": part.rounds, **columns}.items():
        good = _are(is_number, column) and len(column) == len(part.rounds)
        need(good, f"{name}.{key}", column, "a list of numbers, one for each round kept")


def _check_participation(part: Participation) -> None:
    for name, counts in {"seen": part.seen, "chosen": part.chosen}.items():
        good = _are(is_count, counts) and 0 < len(counts) == len(part.seen)
        need(good, f"participation.{name}", counts, "a list of counts, one for each client")
    covered = part.classes_covered
    need(covered is None or is_number(covered), "classes_covered", covered, "a number")


def _check_trace(trace: Trace) -> None:
    for name in ("clients", "rounds"):
        need(is_count(getattr(trace, name)), f"trace.{name}", getattr(trace, name), "a count")
    for name in ("visible", "selected"):
        need(isinstance(getattr(trace, name), str), f"trace.{name}", getattr(trace, name), "a text")
    for moment in trace.moments:
        need(is_count(moment.round), "moment.round", moment.round, "a whole number")
        for name in ("clients", "chosen"):
            ids = getattr(moment, name)
            need(_are(is_count, ids), f"moment.{name}", ids, "a list of client numbers")
        good = _are(is_number, moment.q) and len(moment.q) == len(moment.clients)
        need(good, "moment.q", moment.q, "a list of numbers, one for each client")
        epsilon = moment.epsilon
        need(epsilon is None or is_number(epsilon), "moment.epsilon", epsilon, "a number")


def check_partition(part: Partition) -> None:
    """Look at who holds what, as a stored study has it."""
    need(isinstance(part.setting, str), "partition.setting", part.setting, "a text")
    need(type(part.seed) is int, "partition.seed", part.seed, "a whole number")
    check_counts("partition.counts", part.counts)


def check_counts(name: str, counts: object) -> None:
    """Class counts: at least one client, all with as many classes."""
    good = isinstance(counts, list) and bool(counts) and _are_rows(counts)
    need(good, name, counts, "a list with the class counts of every client")


def _are_rows(rows: Sequence[object]) -> bool:
    lengths = {len(row) if isinstance(row, list) and _are(is_count, row) else 0 for row in rows}
    return len(lengths) == 1 and 0 not in lengths


def _are(kind: Any, values: object) -> bool:
    return isinstance(values, list | tuple) and all(map(kind, values))


def is_count(value: object) -> bool:
    """Return whether a value is a whole number from 0."""
    return type(value) is int and value >= 0


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
