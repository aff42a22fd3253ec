"""Reading a study: a sweep's folder, a comparison's, a single run's, or a stored study file."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedglimpse.config import Config
from fedglimpse.configure import build, read_toml
from fedglimpse.errors import UserError
from fedglimpse.stats.condense import condense
from fedglimpse.stats.fairness import Participation, classes_covered
from fedglimpse.study.cell import Cell, Partition, State, Study
from fedglimpse.study.holdings import Holdings
from fedglimpse.study.parts import joined
from fedglimpse.study.store import read_study
from fedglimpse.study.trace import trace_of
from fedglimpse.version import VERSION

SWEEP_FORMAT = 1
REQUIRED = {"lane", "seed", "round", "visible", "selected"}  # of every record


def load_study(path: Path) -> Study:
    """Read whatever `path` is; raises UserError where it holds no results."""
    if path.is_file():
        return read_study(path)
    if parts := sorted(path.glob("study*.json.gz")):
        return joined([read_study(part) for part in parts], str(path))
    if (path / "sweep.json").exists():
        return _sweep(path)
    if (path / "config.toml").exists():
        return _runs(path, [path])
    folders = sorted(f.parent for f in path.glob("*/config.toml"))
    if folders:
        return _runs(path, folders)
    raise UserError(
        f"{path} holds no results: name a folder made by fedglimpse sweep, compare or run, or a "
        "study.json.gz."
    )


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the complete records of a run folder, compressed or not."""
    plain, packed = folder / "rounds.jsonl", folder / "rounds.jsonl.gz"
    path = packed if packed.exists() else plain
    if not path.exists():
        return []
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path == packed else data
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {error}): restore it, or delete "
            f"{folder} and run it again."
        ) from None
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]
    return [_record(line, path, number) for number, line in enumerate(lines, 1)]


def _record(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not record.keys() >= REQUIRED:
        raise UserError(
            f"{path}, line {number} is not the record of a round: restore the file, or delete "
            f"{path.parent} and run it again."
        )
    return record


class _Reader:
    """Turns run folders into cells, remembering partitions and whose trace is already kept."""

    def __init__(self) -> None:
        self.holdings = Holdings()
        self.partitions: dict[str, Partition] = {}
        self.traced: set[tuple[str, str]] = set()

    def cell(
        self, folder: Path, name: Mapping[str, Any], records: Sequence[dict[str, Any]]
    ) -> Cell:
        """Read one seed. `name` holds id, setting, variant and seed."""
        failed, config = folder / "failed.json", folder / "config.toml"
        reason = str(_json(failed).get("reason", "")) if failed.exists() else ""
        flat = _plain(_config(folder).flat()) if config.exists() else {}
        environment = _json(folder / "environment.json")
        state: State = "missing"
        if (folder / "summary.json").exists():
            state, reason = "finished", ""
        elif failed.exists():
            state = "failed"
        elif records:
            state = "unfinished"
        if not records:
            return Cell(**name, state=state, reason=reason, config=flat, environment=environment)
        counts = self.holdings.of(folder, flat, name["seed"])
        chosen = [r["selected"] for r in records]
        clients = len(counts) if counts else _clients(flat, records)
        key, first = (name["setting"], name["variant"]), state == "finished"
        keep = first and key not in self.traced
        if keep:
            self.traced.add(key)
            if counts and name["setting"] not in self.partitions:
                self.partitions[name["setting"]] = Partition(name["setting"], name["seed"], counts)
        return Cell(
            **name,
            state=state,
            reason=reason,
            config=flat,
            facts=condense(records, int(flat["rounds"])),
            participation=Participation(
                seen=_visits([r["visible"] for r in records], clients),
                chosen=_visits(chosen, clients),
                classes_covered=classes_covered(chosen, counts) if counts else None,
            ),
            trace=trace_of(records, clients) if keep else None,
            theory=_json(folder / "theory.json") or None,
            environment=environment,
        )


def _sweep(path: Path) -> Study:
    plan = _json(path / "sweep.json")
    if plan.get("format") != SWEEP_FORMAT:
        raise UserError(
            f"{path}/sweep.json has format {plan.get('format')} (version {plan.get('version')}), "
            f"this version reads format {SWEEP_FORMAT}: report with the version that made it."
        )
    reader, cells = _Reader(), []
    for name in _planned(plan, path / "sweep.json"):
        folder = path / "cells" / name["id"]
        records = [r for r in read_records(folder) if r["seed"] == name["seed"]]
        cells.append(reader.cell(folder, name, records))
    return Study(
        title=str(plan.get("title", path.name)),
        claim=plan.get("claim", ""),
        control=plan.get("control"),
        targets=plan.get("targets") or {},
        paper=plan.get("paper"),
        cells=cells,
        partitions=list(reader.partitions.values()),
        source=str(path),
    )


def _planned(plan: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """Return the names of a sweep's cells."""
    try:
        return [{k: c[k] for k in ("id", "setting", "variant", "seed")} for c in plan["cells"]]
    except (KeyError, TypeError):
        raise UserError(
            f"{path} does not list the cells of a sweep: restore it, or run the sweep again into "
            "another folder."
        ) from None


def _runs(path: Path, folders: Sequence[Path]) -> Study:
    """Read run folders with seeds as lanes."""
    reader, cells = _Reader(), []
    for folder in folders:
        config, records = _config(folder), read_records(folder)
        for seed in config.seeds:
            name = {
                "id": f"{folder.name}-{seed}",
                "setting": setting_name(config.flat()),
                "variant": config.method,
                "seed": seed,
            }
            cells.append(reader.cell(folder, name, [r for r in records if r["seed"] == seed]))
    title = path.resolve().name
    return Study(title, "", None, {}, None, cells, list(reader.partitions.values()), str(path))


def setting_name(config: Mapping[str, Any]) -> str:
    """Return a short name for what is the same in all methods of a comparison."""
    names = ("data.name", "data.partition", "visibility.kind")
    return " ".join(str(config[name]).replace("_", " ") for name in names)


def _visits(rows: Sequence[Sequence[int]], clients: int) -> tuple[int, ...]:
    counts = [0] * clients
    for ids in rows:
        for i in ids:
            counts[i] += 1
    return tuple(counts)


def _clients(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> int:
    """Return N as configured, or as many as were ever seen."""
    seen = 1 + max((i for r in records for i in r["visible"]), default=0)
    return max(int(config["data.clients"]), seen)


def _config(folder: Path) -> Config:
    try:
        return build(read_toml(folder / "config.toml"))
    except UserError as error:
        raise UserError(
            f"{folder} cannot be read by version {VERSION}: {error} Report it with the version "
            "that made it."
        ) from None


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return a flat configuration as JSON would give it back: lists for tuples."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise UserError(f"{path} is not valid JSON{why}: restore or delete it.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no table of names and values: restore or delete it.")
    return found
