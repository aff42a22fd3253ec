"""Checks of the values in stored files; each raises ValueError with the name and the value.

Readers turn the ValueError into one sentence that names the file.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

from fedglimpse.runs.summary import COSTS
from fedglimpse.studies.results.study import CellName, CellResult, CellState, Partition
from fedglimpse.studies.results.trace import Moment, RunTrace
from fedglimpse.studies.statistics.condense import Climb, Curve, Facts
from fedglimpse.studies.statistics.participation import Participation

Check = Callable[[Any], bool]


def is_count(value: object) -> bool:
    """Return whether a value is a whole number from 0."""
    return type(value) is int and value >= 0


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _is_integer(value: object) -> bool:
    return type(value) is int


def _is_accuracy(value: Any) -> bool:
    return is_number(value) and 0 < value <= 1


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    def is_list(values: Any) -> bool:
        return isinstance(values, list | tuple) and all(map(check, values))

    return is_list


_is_list_of_numbers = _list_of(is_number)
_is_list_of_counts = _list_of(is_count)


def need(is_right: bool, name: str, value: object, expected: str) -> None:
    """Raise ValueError with the name, the value and what it must be, unless it is right."""
    if not is_right:
        raise ValueError(f"`{name}` is {reprlib.repr(value)}, which must be {expected}")


def _need_all(
    values: object,
    names: Iterable[str],
    check: Check,
    expected: str,
    prefix: str = "",
) -> None:
    """Check several attributes of an object in the same way."""
    for name in names:
        value = getattr(values, name)
        need(check(value), f"{prefix}{name}", value, expected)


def check_head(head: Mapping[str, Any]) -> None:
    """Check what comes before the cells, in a stored study as in a sweep's plan.

    Published figures are only checked to be a table: `--paper` may still replace those of a plan.
    """
    for name in ("title", "claim"):
        text = head.get(name, "")
        need(_is_text(text), name, text, "a text")
    control = head.get("control")
    need(
        control is None or _is_text(control),
        "control",
        control,
        "the name of a variant",
    )
    targets = head.get("targets") or {}
    need(
        _is_table(targets),
        "targets",
        targets,
        "a table of accuracies, setting by setting",
    )
    for setting, target in targets.items():
        need(
            _is_accuracy(target),
            f"targets.{setting}",
            target,
            "an accuracy in (0, 1]",
        )
    paper = head.get("paper")
    need(
        paper is None or _is_table(paper),
        "paper",
        paper,
        "a table of published figures",
    )


def check_unique(names: Iterable[CellName]) -> None:
    """Check that each seed of a variant in a setting occurs once: none may hide another."""
    seen: set[CellName] = set()
    for name in names:
        if name in seen:
            setting, variant, seed = name
            raise ValueError(
                f"setting '{setting}', variant '{variant}', seed {seed} is there twice"
            )
        seen.add(name)


def check_cell(cell: CellResult) -> None:
    """Check a cell of a stored study."""
    _need_all(cell, ("id", "setting", "variant", "reason"), _is_text, "a text")
    _need_all(cell, ("seed",), _is_integer, "a whole number")
    states = get_args(CellState)
    need(cell.state in states, "state", cell.state, f"one of {states}")
    _need_all(cell, ("config", "environment"), _is_table, "a table")
    _need_all(cell, ("theory", "latecomers"), _optional(_is_table), "a table")
    if cell.config:
        for name in ("preset", "method", "data.name"):
            value = cell.config.get(name)
            need(_is_text(value), f"config.{name}", value, "a text")
        rounds = cell.config.get("rounds")
        need(is_count(rounds), "config.rounds", rounds, "a whole number")
    if cell.facts is not None:
        _check_facts(cell.facts)
    if cell.participation is not None:
        _check_participation(cell.participation)
    if cell.trace is not None:
        _check_trace(cell.trace)
    for name, value in (cell.latecomers or {}).items():
        need(is_number(value), f"latecomers.{name}", value, "a number")


def _check_facts(facts: Facts) -> None:
    optional = (
        "accuracy",
        "macro_f1",
        "over_rounds",
        "best",
        "reward",
        "first_tenth",
        "throughout",
    )
    required = ("rejected", "seconds", "diverged")
    _need_all(facts, optional, _optional(is_number), "a number")
    _need_all(facts, required, is_number, "a number")
    _check_columns("curve", facts.curve, ("rounds", "accuracy", "smooth"))
    _check_columns("climb", facts.climb, ("rounds", "heights"))
    played = facts.climb.played
    need(is_count(played), "climb.played", played, "a whole number")
    for name in COSTS:
        total = facts.climb.totals[name]
        need(is_number(total), f"totals.{name}", total, "a number")


def _check_columns(prefix: str, table: Curve | Climb, names: Sequence[str]) -> None:
    """Check that all columns are as long as the column of rounds."""
    columns: dict[str, Any] = {}
    for name in names:
        columns[name] = getattr(table, name)
    for name in COSTS:
        columns[name] = table.costs[name]
    for name, column in columns.items():
        need(
            _is_list_of_numbers(column) and len(column) == len(table.rounds),
            f"{prefix}.{name}",
            column,
            "a list of numbers, one for each stored round",
        )


def _check_participation(participation: Participation) -> None:
    for name in ("seen", "chosen"):
        counts = getattr(participation, name)
        need(
            _is_list_of_counts(counts) and 0 < len(counts) == len(participation.seen),
            f"participation.{name}",
            counts,
            "a list of counts, one for each client",
        )
    _need_all(participation, ("classes_covered",), _optional(is_number), "a number")


def _check_trace(trace: RunTrace) -> None:
    _need_all(trace, ("clients", "rounds"), is_count, "a count", "trace.")
    _need_all(trace, ("visible", "selected"), _is_text, "a text", "trace.")
    for moment in trace.moments:
        _check_moment(moment)


def _check_moment(moment: Moment) -> None:
    _need_all(moment, ("round",), is_count, "a whole number", "moment.")
    _need_all(
        moment,
        ("clients", "chosen"),
        _is_list_of_counts,
        "a list of client numbers",
        "moment.",
    )
    need(
        _is_list_of_numbers(moment.q) and len(moment.q) == len(moment.clients),
        "moment.q",
        moment.q,
        "a list of numbers, one for each client",
    )
    _need_all(moment, ("epsilon",), _optional(is_number), "a number", "moment.")


def check_partition(partition: Partition) -> None:
    """Check the class counts of clients in a stored study."""
    _need_all(partition, ("setting",), _is_text, "a text", "partition.")
    _need_all(partition, ("seed",), _is_integer, "a whole number", "partition.")
    check_counts("partition.counts", partition.counts)


def check_counts(name: str, counts: object) -> None:
    """Check class counts: at least one client, all with the same number of classes."""
    need(
        isinstance(counts, list) and bool(counts) and _are_rows(counts),
        name,
        counts,
        "a list with the class counts of every client",
    )


def _are_rows(rows: Sequence[Any]) -> bool:
    """Return whether all are lists of counts of one length, which is not 0."""
    lengths: set[int] = set()
    for row in rows:
        if not isinstance(row, list) or not _is_list_of_counts(row):
            return False
        lengths.add(len(row))
    return len(lengths) == 1 and 0 not in lengths
