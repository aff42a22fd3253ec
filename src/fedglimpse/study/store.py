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
from fedglimpse.stats.condense import Climb, Curve, Facts
from fedglimpse.stats.fairness import Participation
from fedglimpse.study.cell import Cell, Partition, Study
from fedglimpse.study.trace import Moment, Trace
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
        data["cells"] = [_cell(cell) for cell in data["cells"]]
        data["partitions"] = [Partition(**p) for p in data["partitions"]]
        return Study(**data)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged, or no study of version {version} ({type(error).__name__}: "
            f"{error}): restore it, or make it again with fedglimpse report."
        ) from None


def _cell(data: dict[str, Any]) -> Cell:
    facts, visits, trace = data["facts"], data["participation"], data["trace"]
    return Cell(
        **data
        | {
            "facts": None if facts is None else _facts(facts),
            "participation": None if visits is None else Participation(**_tuples(visits)),
            "trace": None if trace is None else _trace(trace),
        }
    )


def _facts(data: Mapping[str, Any]) -> Facts:
    curve, climb = data["curve"], data["climb"]
    return Facts(
        **{**data, "curve": Curve(**_columns(curve)), "climb": Climb(**_columns(climb))},
    )


def _columns(data: Mapping[str, Any]) -> dict[str, Any]:
    return _tuples(data) | {"costs": _tuples(data["costs"])}


def _trace(data: Mapping[str, Any]) -> Trace:
    return Trace(**{**data, "moments": [Moment(**m) for m in data["moments"]]})


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
