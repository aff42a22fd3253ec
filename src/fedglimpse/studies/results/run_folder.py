"""The files of one run folder, checked before anything is computed from them.

Records (`rounds.jsonl`, compressed or not), small JSON files, and how many examples of each class
every client holds: read from `partition.json`, or computed again from the configuration.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedglimpse.config.loading import StoredConfig, read_stored, read_toml
from fedglimpse.data.dataset import Dataset
from fedglimpse.data.sources import load
from fedglimpse.errors import UserError
from fedglimpse.plugins import UntrustedCode
from fedglimpse.runs.build import population_of
from fedglimpse.runs.class_counts import FILE as PARTITION
from fedglimpse.runs.class_counts import MOST_CLIENTS
from fedglimpse.runs.provenance import draws_of
from fedglimpse.storage import store
from fedglimpse.storage.checkpoint import Checkpoint
from fedglimpse.studies.results.checks import check_counts
from fedglimpse.types import RECORD_FIELDS, RoundRecord
from fedglimpse.version import DRAWS, VERSION

CLIENT_FIELDS = tuple(name for name, kind in RECORD_FIELDS.items() if kind == "clients")
log = logging.getLogger("fedglimpse")

Counts = list[list[int]]  # [N, C]


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the complete records of a run folder, compressed or not; raises UserError."""
    path = records_file(folder)
    if not path.exists():
        return []
    fix = f"restore it, or delete {folder} and run it again"
    try:
        content = store.read(path, fix)
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise store.damage(path, f"{type(error).__name__}: {error}", fix) from None
    if not (folder / "summary.json").exists():
        _check_counted(folder, path, content)
    complete = content[: content.rfind(b"\n") + 1]
    records: list[dict[str, Any]] = []
    for number, line in enumerate(complete.split(b"\n")[:-1], 1):
        records.append(_read_record(line, path, number))
    _check_order(records, path)
    return records


def _check_counted(folder: Path, path: Path, content: bytes) -> None:
    """Compare the records of a run that has not finished with what its checkpoint counts."""
    state = Checkpoint(folder).read()
    if state is not None:
        store.check_beginning(path, content, state)


def records_file(folder: Path) -> Path:
    """Return the file that holds, or would hold, the records of a run folder."""
    packed = folder / "rounds.jsonl.gz"
    return packed if packed.exists() else folder / "rounds.jsonl"


def _read_record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record: Any = json.loads(line)
    except ValueError:
        record = None  # which `from_json` refuses
    try:
        RoundRecord.from_json(record)
    except ValueError as error:
        raise UserError(
            f"{path}, line {number} is not the record of a round ({error}): restore the file, or "
            f"delete {path.parent} and run it again."
        ) from None
    return dict(record)


def _check_order(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Raise UserError if a round of a seed is repeated or missing."""
    next_round: dict[tuple[int, int], int] = {}
    for number, record in enumerate(records, 1):
        lane = record["lane"], record["seed"]
        expected = next_round.get(lane, 0)
        if record["round"] != expected:
            repeated = record["round"] < expected
            problem = "a second time" if repeated else f"before round {expected}"
            fix = "delete that line" if repeated else "restore the file"
            raise UserError(
                f"{path}, line {number} holds round {record['round']} of seed {record['seed']} "
                f"{problem}: {fix}, or delete {path.parent} and run it again."
            )
        next_round[lane] = expected + 1


def check_clients(records: Sequence[Mapping[str, Any]], clients: int, folder: Path) -> None:
    """Raise UserError if a record names a client that the run does not have."""
    for record in records:
        for name in CLIENT_FIELDS:
            highest = max(record[name], default=0)
            if highest >= clients:
                raise UserError(
                    f"{records_file(folder)} names client {highest} in round {record['round']} of "
                    f"seed {record['seed']}, but there are {clients}, from 0: restore it and "
                    f"config.toml, or delete {folder} and run it again."
                )


def read_config(folder: Path) -> StoredConfig:
    """Return the configuration of a run folder; raises UserError if this version cannot read it."""
    file = folder / "config.toml"
    store.check(file, f"restore it, or delete {folder} and run it again")
    try:
        return read_stored(read_toml(file))
    except UserError as error:
        raise UserError(
            f"{folder} cannot be read by version {VERSION}: {error} Report it with the version "
            "that made it."
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the table in a file, an empty one if there is no file; raises UserError."""
    if not path.exists():
        return {}
    try:
        content = json.loads(store.read(path, "restore or delete it"))
    except (OSError, ValueError) as error:
        reason = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise UserError(f"{path} is not valid JSON{reason}: restore or delete it.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no table of names and values: restore or delete it.")
    return content


class ClassCounts:
    """Examples of each class that clients hold; datasets and partitions are made only once."""

    def __init__(self) -> None:
        """Create empty caches."""
        self._datasets: dict[str, Dataset | None] = {}
        self._computed: dict[tuple[Any, ...], Counts | None] = {}
        self._untrusted: set[str] = set()  # sentences that were said

    def of(self, folder: Path, config: Mapping[str, Any], seed: int) -> Counts | None:
        """Return the class counts of one seed's clients; None if the data is not available.

        Neither are they where the run was made with other draws than today's.
        Raises UserError for a damaged `partition.json`.
        """
        stored = folder / PARTITION
        if stored.exists():
            return _read_counts(stored, str(seed))
        if draws_of(read_json(folder / "environment.json")) != DRAWS:
            return None
        data_settings: list[tuple[str, Any]] = []
        for name, value in sorted(config.items()):
            if name.startswith("data."):
                data_settings.append((name, value))
        key = (*data_settings, seed)
        if key not in self._computed:
            self._computed[key] = self._compute(config, seed)
        return self._computed[key]

    def _compute(self, config: Mapping[str, Any], seed: int) -> Counts | None:
        try:
            dataset = self._dataset(str(config["data.name"]))
            if dataset is None or config["data.clients"] > MOST_CLIENTS:
                return None
            population = population_of(read_stored(config).config, dataset, seed)
        except UntrustedCode as error:
            if str(error) not in self._untrusted:
                log.warning("Class counts of clients are left out: %s", error)
            self._untrusted.add(str(error))
            return None
        except UserError:  # such as clients of a Flower federation, which have data of their own
            return None
        all_clients = torch.arange(population.num_clients)
        counts: Counts = population.label_histogram(all_clients).tolist()
        return counts

    def _dataset(self, name: str) -> Dataset | None:
        if name not in self._datasets:
            try:
                self._datasets[name] = load(name)
            except UntrustedCode:
                raise
            except UserError:  # results can be read on a machine that does not have the data
                self._datasets[name] = None
        return self._datasets[name]


def _read_counts(path: Path, seed: str) -> Counts | None:
    counts: Counts | None = read_json(path).get(seed)
    if counts is None:
        return None
    try:
        check_counts(seed, counts)
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore or delete it.") from None
    return counts
