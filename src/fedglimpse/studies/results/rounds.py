"""The records of a run folder: read, and looked at before anything is worked out from them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedglimpse.errors import UserError
from fedglimpse.types import RECORD_FIELDS, RoundRecord

CLIENTS = tuple(name for name, kind in RECORD_FIELDS.items() if kind == "clients")


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the complete records of a run folder, compressed or not; raises UserError."""
    path = records_file(folder)
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {error}): restore it, or delete "
            f"{folder} and run it again."
        ) from None
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
    records = [_record(line, path, number) for number, line in enumerate(lines, 1)]
    _check_order(records, path)
    return records


def records_file(folder: Path) -> Path:
    """Return where the records of a run folder are, or would be."""
    packed = folder / "rounds.jsonl.gz"
    return packed if packed.exists() else folder / "rounds.jsonl"


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = _parsed(line)
        RoundRecord.from_json(record)
    except ValueError as error:
        raise UserError(
            f"{path}, line {number} is not the record of a round ({error}): restore the file, or "
            f"delete {path.parent} and run it again."
        ) from None
    return record


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _check_order(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Raise UserError where a round of a seed comes twice or is missing."""
    coming: dict[tuple[int, int], int] = {}
    for number, record in enumerate(records, 1):
        lane, here = (record["lane"], record["seed"]), record["round"]
        wanted = coming.get(lane, 0)
        if here != wanted:
            what = "a second time" if here < wanted else f"before round {wanted}"
            fix = "delete that line" if here < wanted else "restore the file"
            raise UserError(
                f"{path}, line {number} holds round {here} of seed {record['seed']} {what}: {fix}, "
                f"or delete {path.parent} and run it again."
            )
        coming[lane] = wanted + 1


def check_clients(records: Sequence[Mapping[str, Any]], clients: int, folder: Path) -> None:
    """Raise UserError where a record names a client that the run does not have."""
    for record in records:
        for name in CLIENTS:
            most = max(record[name], default=0)
            if most >= clients:
                raise UserError(
                    f"{records_file(folder)} names client {most} in round {record['round']} of "
                    f"seed {record['seed']}, but there are {clients}, from 0: restore it and "
                    f"config.toml, or delete {folder} and run it again."
                )
