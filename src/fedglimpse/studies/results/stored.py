"""A whole study in one small file, `study.json.gz`: thinned curves, exact statistics."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedglimpse.errors import UserError
from fedglimpse.storage import store
from fedglimpse.studies.results.checks import (
    check_cell,
    check_head,
    check_partition,
    check_unique,
)
from fedglimpse.studies.results.published import problem_of
from fedglimpse.studies.results.study import CellResult, Partition, Study
from fedglimpse.studies.results.trace import Moment, RunTrace, drawable
from fedglimpse.studies.statistics.condense import Climb, Curve, Facts
from fedglimpse.studies.statistics.participation import Participation
from fedglimpse.version import VERSION

FORMAT = 1


def write_study(study: Study, path: Path) -> None:
    """Write a study; the same study gives the same bytes."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        **dataclasses.asdict(study),
    }
    text = json.dumps(content, separators=(",", ":"))
    store.write(path, gzip.compress(text.encode(), mtime=0))


def read_study(path: Path) -> Study:
    """Read what `write_study` wrote; raises UserError for anything else."""
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        stored_format = content.pop("format")
        version = content.pop("version", None)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, AttributeError, TypeError):
        raise UserError(
            f"{path} is not a stored study: name a study.json.gz or a folder of results."
        ) from None
    if stored_format != FORMAT:
        raise UserError(
            f"{path} has format {stored_format} (version {version}), this is version {VERSION} "
            f"with format {FORMAT}: read it with that version."
        )
    try:
        return _to_study(content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = str(error)
        if not isinstance(error, ValueError):
            reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path} is damaged, or no study of version {version} ({reason}): restore it, or make "
            "it again with fedglimpse report."
        ) from None


def _to_study(content: dict[str, Any]) -> Study:
    check_head(content)
    if content["paper"] is not None:
        problem = problem_of(content["paper"])
        if problem:
            raise ValueError(f"its table `paper` {problem}")
    content["cells"] = list(map(_to_cell, content["cells"]))
    content["partitions"] = list(map(_to_partition, content["partitions"]))
    study = Study(**content)
    check_unique(cell.name for cell in study.cells)
    return study


def _to_partition(content: dict[str, Any]) -> Partition:
    partition = Partition(**content)
    check_partition(partition)
    return partition


def _to_cell(content: dict[str, Any]) -> CellResult:
    facts = content["facts"]
    participation = content["participation"]
    trace = content["trace"]
    if facts is not None:
        content["facts"] = _to_facts(facts)
    if participation is not None:
        content["participation"] = Participation(**_with_tuples(participation))
    if trace is not None:
        content["trace"] = _to_trace(trace)
    cell = CellResult(**content)
    check_cell(cell)
    return cell


def _to_facts(content: dict[str, Any]) -> Facts:
    curve = Curve(**_columns(content.pop("curve")))
    climb = Climb(**_columns(content.pop("climb")))
    return Facts(curve=curve, climb=climb, **content)


def _columns(content: Mapping[str, Any]) -> dict[str, Any]:
    columns = _with_tuples(content)
    columns["costs"] = _with_tuples(content["costs"])
    return columns


def _to_trace(content: dict[str, Any]) -> RunTrace:
    moments = list(map(_to_moment, content.pop("moments")))
    return RunTrace(moments=moments, **content)


def _to_moment(content: dict[str, Any]) -> Moment:
    num_clients = len(content["clients"])
    attention = drawable(content.pop("attention"), num_clients)
    return Moment(attention=attention, **content)


def _with_tuples(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with tuples for lists, as the dataclasses have them."""
    converted: dict[str, Any] = {}
    for key, value in content.items():
        converted[key] = tuple(value) if isinstance(value, list) else value
    return converted
