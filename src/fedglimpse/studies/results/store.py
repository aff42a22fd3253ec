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
from fedglimpse.studies.results.cell import Cell, Partition, Study
from fedglimpse.studies.results.check import check_cell, check_head, check_once, check_partition
from fedglimpse.studies.results.paper import problem_of
from fedglimpse.studies.results.trace import Moment, Trace, drawable
from fedglimpse.studies.statistics.condense import Climb, Curve, Facts
from fedglimpse.studies.statistics.fairness import Participation
from fedglimpse.version import VERSION

FORMAT = 1


def write_study(study: Study, path: Path) -> None:
    """Write a study; the same study gives the same bytes."""
    head = {"format": FORMAT, "version": VERSION}
    text = json.dumps({**head, **dataclasses.asdict(study)}, separators=(",", ":"))
    temporary = path.with_name(path.name + ".part")
    temporary.write_bytes(gzip.compress(text.encode(), mtime=0))
    temporary.replace(path)


def read_study(path: Path) -> Study:
    """Read what `write_study` wrote; raises UserError for anything else."""
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        found = data.pop("format")
    except (OSError, EOFError, zlib.error, ValueError, KeyError, AttributeError, TypeError):
        raise UserError(
            f"{path} is not a stored study: name a study.json.gz or a folder of results."
        ) from None
    version = data.pop("version", None)
    if found != FORMAT:
        raise UserError(
            f"{path} has format {found} (version {version}), this is version {VERSION} with "
            f"format {FORMAT}: read it with that version."
        )
    try:
        check_head(data)
        if data["paper"] is not None and (problem := problem_of(data["paper"])):
            raise ValueError(f"its table `paper` {problem}")
        data["cells"] = [_cell(cell) for cell in data["cells"]]
        data["partitions"] = [_partition(part) for part in data["partitions"]]
        check_once(data["cells"])
        return Study(**data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path} is damaged, or no study of version {version} ({why}): restore it, or make it "
            "again with fedglimpse report."
        ) from None


def _partition(data: dict[str, Any]) -> Partition:
    part = Partition(**data)
    check_partition(part)
    return part


def _cell(data: dict[str, Any]) -> Cell:
    facts, visits, trace = data["facts"], data["participation"], data["trace"]
    cell = Cell(
        **data
        | {
            "facts": None if facts is None else _facts(facts),
            "participation": None if visits is None else Participation(**_tuples(visits)),
            "trace": None if trace is None else _trace(trace),
        }
    )
    check_cell(cell)
    return cell


def _facts(data: Mapping[str, Any]) -> Facts:
    curve, climb = data["curve"], data["climb"]
    return Facts(
        **{**data, "curve": Curve(**_columns(curve)), "climb": Climb(**_columns(climb))},
    )


def _columns(data: Mapping[str, Any]) -> dict[str, Any]:
    return _tuples(data) | {"costs": _tuples(data["costs"])}


def _trace(data: Mapping[str, Any]) -> Trace:
    return Trace(**{**data, "moments": [_moment(moment) for moment in data["moments"]]})


def _moment(data: Mapping[str, Any]) -> Moment:
    return Moment(**{**data, "attention": drawable(data["attention"], len(data["clients"]))})


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
