"""Reading a study: a sweep's folder, a comparison's, a single run's, or a stored study file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedglimpse.config.loading import StoredConfig, read_stored, read_toml
from fedglimpse.errors import UserError
from fedglimpse.studies.results.cell import Cell, Partition, State, Study
from fedglimpse.studies.results.check import check_head, check_once
from fedglimpse.studies.results.holdings import Holdings, read_json
from fedglimpse.studies.results.names import names_of
from fedglimpse.studies.results.parts import joined
from fedglimpse.studies.results.rounds import check_clients, read_records, records_file
from fedglimpse.studies.results.store import read_study
from fedglimpse.studies.results.trace import trace_of
from fedglimpse.studies.statistics.condense import Facts, condense
from fedglimpse.studies.statistics.fairness import Participation, classes_covered
from fedglimpse.version import VERSION

__all__ = ["load_study", "read_records"]

SWEEP_FORMAT = 1


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
        config = folder / "config.toml"
        flat = _plain(_config(folder).flat()) if config.exists() else {}
        if records and not flat:
            raise UserError(
                f"{config} is not there, though {folder} has records: restore it, or delete the "
                "folder and run it again."
            )
        facts = condense(records, int(flat["rounds"])) if records else None
        state, reason = _state(folder, facts, flat)
        environment = read_json(folder / "environment.json")
        if facts is None:
            return Cell(**name, state=state, reason=reason, config=flat, environment=environment)
        counts = self.holdings.of(folder, flat, name["seed"])
        chosen = [r["selected"] for r in records]
        clients = len(counts) if counts else _clients(flat, records)
        check_clients(records, clients, folder)
        key = name["setting"], name["variant"]
        keep = state == "finished" and key not in self.traced
        if keep:
            self.traced.add(key)
            if counts and name["setting"] not in self.partitions:
                self.partitions[name["setting"]] = Partition(name["setting"], name["seed"], counts)
        return Cell(
            **name,
            state=state,
            reason=reason,
            config=flat,
            facts=facts,
            participation=Participation(
                seen=_visits([r["visible"] for r in records], clients),
                chosen=_visits(chosen, clients),
                classes_covered=classes_covered(chosen, counts) if counts else None,
            ),
            trace=trace_of(records, clients) if keep else None,
            theory=read_json(folder / "theory.json") or None,
            environment=environment,
        )


def _state(folder: Path, facts: Facts | None, config: Mapping[str, Any]) -> tuple[State, str]:
    """Return what has become of a run, and why it has not finished if that is known.

    A run with a summary whose records do not reach the end has lost some: it has not finished.
    """
    failed = folder / "failed.json"
    reason = str(read_json(failed).get("reason", ""))
    if (folder / "summary.json").exists():
        if facts is not None and facts.accuracy is not None:
            return "finished", ""
        played, planned = facts.climb.played if facts else 0, config.get("rounds", "its")
        file = f"{folder.name}/{records_file(folder).name}"  # a study is not bound to a place
        if played == planned:
            return "unfinished", f"{file} has no accuracy of the last rounds"
        return "unfinished", f"{file} has {played} of {planned} rounds, though there is a summary"
    if failed.exists():
        return "failed", reason
    return ("missing" if facts is None else "unfinished"), ""


def _sweep(path: Path) -> Study:
    plan = read_json(path / "sweep.json")
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
    """Return the names of a sweep's cells, once the plan is known to be one."""
    try:
        names = [{k: c[k] for k in ("id", "setting", "variant", "seed")} for c in plan["cells"]]
        good = all(
            type(n["seed"]) is int
            and all(isinstance(n[k], str) for k in ("id", "setting", "variant"))
            for n in names
        )
        if not good:
            raise TypeError
    except (KeyError, TypeError):
        raise UserError(
            f"{path} does not list the cells of a sweep: restore it, or run the sweep again into "
            "another folder."
        ) from None
    try:
        check_head(plan)
        check_once(Cell(**name, state="missing") for name in names)
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}): restore it, or run the sweep again into another folder."
        ) from None
    return names


def _runs(path: Path, folders: Sequence[Path]) -> Study:
    """Read run folders with seeds as lanes; no run may hide another."""
    configs = {folder: _config(folder) for folder in folders}
    names = names_of({folder: config.flat() for folder, config in configs.items()})
    reader, cells, found = _Reader(), [], dict[tuple[str, str, int], Path]()
    for folder, config in configs.items():
        records, (setting, variant) = read_records(folder), names[folder]
        for seed in config.config.seeds:
            other = found.setdefault((setting, variant, seed), folder)
            if other != folder:
                raise UserError(
                    f"{other} and {folder} hold the same run ({variant}, seed {seed}, {setting}): "
                    f"move one of them out of {path}, or run it with another seed."
                )
            name = {"id": f"{folder.name}-{seed}", "setting": setting, "variant": variant}
            mine = [r for r in records if r["seed"] == seed]
            cells.append(reader.cell(folder, {**name, "seed": seed}, mine))
    title = path.resolve().name
    return Study(title, "", None, {}, None, cells, list(reader.partitions.values()), str(path))


def _visits(rows: Sequence[Sequence[int]], clients: int) -> tuple[int, ...]:
    counts = [0] * clients
    for ids in rows:
        for i in ids:
            counts[i] += 1
    return tuple(counts)


def _clients(config: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> int:
    """Return N as configured; for clients that are subjects, as many as were ever seen."""
    seen = 1 + max((i for r in records for i in r["visible"]), default=0)
    return int(config["data.clients"]) or seen


def _config(folder: Path) -> StoredConfig:
    try:
        return read_stored(read_toml(folder / "config.toml"))
    except UserError as error:
        raise UserError(
            f"{folder} cannot be read by version {VERSION}: {error} Report it with the version "
            "that made it."
        ) from None


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """Return a flat configuration as JSON would give it back: lists for tuples."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}
