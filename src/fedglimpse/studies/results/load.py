"""Reading a study: a sweep's folder, those of its shards, a comparison's, a run's, a stored file.

A sweep's plan names its settings and variants. Run folders without a plan get names here: a setting
after its data, a variant after its method, and where that does not distinguish two runs, the keys
in which they differ are added: `fedavg (local.lr=0.0001)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedglimpse.config import retired
from fedglimpse.config.loading import StoredConfig
from fedglimpse.errors import UserError
from fedglimpse.runs.folder import FREE_TO_CHANGE
from fedglimpse.runs.summary import LATECOMERS
from fedglimpse.studies.results.checks import check_head, check_unique
from fedglimpse.studies.results.run_folder import (
    ClassCounts,
    check_clients,
    read_config,
    read_json,
    read_records,
    records_file,
)
from fedglimpse.studies.results.stored import read_study
from fedglimpse.studies.results.study import (
    CellName,
    CellResult,
    CellState,
    Partition,
    Study,
    join_studies,
)
from fedglimpse.studies.results.trace import trace_of
from fedglimpse.studies.statistics.condense import Facts, condense
from fedglimpse.studies.statistics.participation import Participation, classes_covered

SWEEP_FORMAT = 1
# What all methods of a comparison have in common; every other key belongs to the variant.
SETTING = ("data.", "model.", "visibility.", "selection.", "evaluate.", "rounds")
MAX_KEYS = 3  # of the differing keys in brackets; if there are more, the folder's name is used
MAX_LETTERS = 60  # in brackets

Record = dict[str, Any]
Configs = Mapping[Path, Mapping[str, Any]]  # folder -> every dotted key


def load_study(path: Path) -> Study:
    """Read the study at `path`; raises UserError if it holds no results."""
    if path.is_file():
        return read_study(path)
    stored = sorted(path.glob("study*.json.gz"))
    if stored:
        return join_studies(list(map(read_study, stored)), str(path))
    if (path / "sweep.json").exists():
        return _read_sweep(path)
    if (path / "config.toml").exists():
        return _read_runs(path, [path])
    shards = sorted(file.parent for file in path.glob("*/sweep.json"))
    if shards:
        return join_studies(list(map(_read_sweep, shards)), str(path))
    folders = sorted(file.parent for file in path.glob("*/config.toml"))
    if folders:
        return _read_runs(path, folders)
    raise UserError(
        f"{path} holds no results: name a folder made by fedglimpse sweep, compare or run, or a "
        "study.json.gz.",
        key="PATH",
    )


@dataclass(frozen=True)
class _PlannedCell:
    """What a sweep's plan, or a run folder, says about a cell before its records are read."""

    id: str
    setting: str
    variant: str
    seed: int

    @property
    def name(self) -> CellName:
        return self.setting, self.variant, self.seed


class _Reader:
    """Turns run folders into cells; partitions and traces are kept once for each setting."""

    def __init__(self) -> None:
        self.class_counts = ClassCounts()
        self.partitions: dict[str, Partition] = {}
        self.traced: set[tuple[str, str]] = set()

    def cell(self, folder: Path, planned: _PlannedCell, records: Sequence[Record]) -> CellResult:
        """Read one seed of a run folder."""
        config = _config_of(folder, has_records=bool(records))
        facts = condense(records, int(config["rounds"])) if records else None
        state, reason = _state(folder, facts, config)
        common: dict[str, Any] = {
            **vars(planned),
            "state": state,
            "reason": reason,
            "config": config,
            "environment": read_json(folder / "environment.json"),
        }
        if facts is None:
            return CellResult(**common)
        counts = self.class_counts.of(folder, config, planned.seed)
        clients = len(counts) if counts else _num_clients(config, records)
        check_clients(records, clients, folder)
        trace = None
        is_traced = (planned.setting, planned.variant) in self.traced
        if state == "finished" and not is_traced:
            trace = trace_of(records, clients)
            self._note_trace(planned, counts)
        theory = read_json(folder / "theory.json")
        return CellResult(
            **common,
            facts=facts,
            participation=_participation(records, clients, counts),
            trace=trace,
            theory=theory or None,
            latecomers=_latecomers(folder, planned.seed) if state == "finished" else None,
        )

    def _note_trace(self, planned: _PlannedCell, counts: list[list[int]] | None) -> None:
        self.traced.add((planned.setting, planned.variant))
        if counts and planned.setting not in self.partitions:
            partition = Partition(planned.setting, planned.seed, counts)
            self.partitions[planned.setting] = partition


def _latecomers(folder: Path, seed: int) -> Mapping[str, Any] | None:
    """Return what summary.json says about clients that came late; None where there are none."""
    seeds = read_json(folder / "summary.json").get(LATECOMERS)
    return seeds.get(str(seed)) if isinstance(seeds, dict) else None


def _config_of(folder: Path, has_records: bool) -> dict[str, Any]:
    """Return every dotted key of a run, empty if it has not begun; lists for tuples, as in JSON."""
    file = folder / "config.toml"
    if file.exists():
        config: dict[str, Any] = {}
        for key, value in read_config(folder).flat().items():
            config[key] = list(value) if isinstance(value, tuple) else value
        return config
    if has_records:
        raise UserError(
            f"{file} is not there, though {folder} has records: restore it, or delete the folder "
            "and run it again."
        )
    return {}


def _state(folder: Path, facts: Facts | None, config: Mapping[str, Any]) -> tuple[CellState, str]:
    """Return the state of a run, and why it has not finished if that is known.

    A run with a summary whose records do not reach the end has lost some: it has not finished.
    """
    failure = read_json(folder / "failed.json")
    if (folder / "summary.json").exists():
        if facts is not None and facts.accuracy is not None:
            return "finished", ""
        run = facts.climb.played if facts else 0
        planned = config.get("rounds", "its")
        file = f"{folder.name}/{records_file(folder).name}"  # a study may be moved: no full path
        if run == planned:
            return "unfinished", f"{file} has no accuracy of the last rounds"
        return "unfinished", f"{file} has {run} of {planned} rounds, though there is a summary"
    if (folder / "failed.json").exists():
        return "failed", str(failure.get("reason", ""))
    return ("missing" if facts is None else "unfinished"), ""


def _participation(
    records: Sequence[Record],
    clients: int,
    counts: list[list[int]] | None,
) -> Participation:
    seen = [0] * clients
    chosen = [0] * clients
    selected: list[list[int]] = []
    for record in records:
        selected.append(record["selected"])
        for i in record["visible"]:
            seen[i] += 1
        for i in record["selected"]:
            chosen[i] += 1
    covered = classes_covered(selected, counts) if counts else None
    return Participation(tuple(seen), tuple(chosen), covered)


def _num_clients(config: Mapping[str, Any], records: Sequence[Record]) -> int:
    """Return N as configured; if clients are subjects of the data, as many as were ever seen."""
    highest = -1
    for record in records:
        highest = max([highest, *record["visible"]])
    return int(config["data.clients"]) or highest + 1


def _of_seed(records: Sequence[Record], seed: int) -> list[Record]:
    return [record for record in records if record["seed"] == seed]


def _read_sweep(path: Path) -> Study:
    plan = read_json(path / "sweep.json")
    if plan.get("format") != SWEEP_FORMAT:
        raise UserError(
            f"{path}/sweep.json has format {plan.get('format')} (version {plan.get('version')}), "
            f"this version reads format {SWEEP_FORMAT}: report with the version that made it."
        )
    reader = _Reader()
    cells: list[CellResult] = []
    for planned in _planned_cells(plan, path / "sweep.json"):
        folder = path / "cells" / planned.id
        records = _of_seed(read_records(folder), planned.seed)
        cells.append(reader.cell(folder, planned, records))
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


def _planned_cells(plan: Mapping[str, Any], path: Path) -> list[_PlannedCell]:
    """Return a sweep's cells, after checking that the plan is one."""
    cells: list[_PlannedCell] = []
    try:
        for cell in plan["cells"]:
            cells.append(_planned_cell(cell))
    except (KeyError, TypeError):
        raise UserError(
            f"{path} does not list the cells of a sweep: restore it, or run the sweep again into "
            "another folder."
        ) from None
    try:
        check_head(plan)
        check_unique(cell.name for cell in cells)
    except ValueError as error:
        raise UserError(
            f"{path} is damaged ({error}): restore it, or run the sweep again into another folder."
        ) from None
    return cells


def _planned_cell(content: Mapping[str, Any]) -> _PlannedCell:
    cell = _PlannedCell(
        id=content["id"],
        setting=content["setting"],
        variant=content["variant"],
        seed=content["seed"],
    )
    if type(cell.seed) is not int:
        raise TypeError
    for text in (cell.id, cell.setting, cell.variant):
        if not isinstance(text, str):
            raise TypeError
    return cell


def _read_runs(path: Path, folders: Sequence[Path]) -> Study:
    """Read run folders with seeds as lanes; no run may hide another."""
    configs: dict[Path, StoredConfig] = {}
    flat_configs: dict[Path, dict[str, Any]] = {}
    for folder in folders:
        configs[folder] = read_config(folder)
        flat_configs[folder] = configs[folder].flat()
    names = names_of(flat_configs)
    reader = _Reader()
    cells: list[CellResult] = []
    folder_of: dict[CellName, Path] = {}
    for folder, config in configs.items():
        records = read_records(folder)
        setting, variant = names[folder]
        for seed in config.config.seeds:
            planned = _PlannedCell(
                id=f"{folder.name}-{seed}",
                setting=setting,
                variant=variant,
                seed=seed,
            )
            other = folder_of.setdefault(planned.name, folder)
            if other != folder:
                raise UserError(
                    f"{other} and {folder} hold the same run ({variant}, seed {seed}, {setting}): "
                    f"move one of them out of {path}, or run it with another seed."
                )
            records_of_seed = _of_seed(records, seed)
            cells.append(reader.cell(folder, planned, records_of_seed))
    return Study(
        title=path.resolve().name,
        claim="",
        control=None,
        targets={},
        paper=None,
        cells=cells,
        partitions=list(reader.partitions.values()),
        source=str(path),
    )


def names_of(configs: Configs) -> dict[Path, tuple[str, str]]:
    """Return setting and variant of every run folder.

    Two folders have the same names only if nothing but seeds, and keys that results do not depend
    on, differs between them.
    """
    setting_names: dict[Path, str] = {}
    for folder, config in configs.items():
        setting_names[folder] = _setting_name(config)
    setting_names = _distinguished(
        setting_names,
        groups=setting_names,
        configs=_restricted(configs, _is_setting),
    )
    variant_names: dict[Path, str] = {}
    groups: dict[Path, tuple[str, str]] = {}
    for folder, config in configs.items():
        variant_names[folder] = str(config["method"])
        groups[folder] = setting_names[folder], config["method"]
    variant_names = _distinguished(
        variant_names,
        groups,
        configs=_restricted(configs, _is_variant),
    )
    names: dict[Path, tuple[str, str]] = {}
    for folder in configs:
        names[folder] = setting_names[folder], variant_names[folder]
    return names


def _is_setting(key: str) -> bool:
    return key.startswith(SETTING)


def _is_variant(key: str) -> bool:
    return key != "seeds" and not _is_setting(key)


def _restricted(
    configs: Configs,
    belongs: Callable[[str], bool],
) -> dict[Path, dict[str, Any]]:
    """Return the configurations with only those keys that belong."""
    restricted: dict[Path, dict[str, Any]] = {}
    for folder, config in configs.items():
        restricted[folder] = {}
        for key, value in config.items():
            if belongs(key):
                restricted[folder][key] = value
    return restricted


def _setting_name(config: Mapping[str, Any]) -> str:
    partition = str(config["data.partition"]).replace("_", " ")
    visibility = str(config["visibility.kind"]).replace("_", " ")
    return f"{config['data.name']} {partition} {visibility}"


def _distinguished(
    names: Mapping[Path, str],
    groups: Mapping[Path, Hashable],
    configs: Configs,
) -> dict[Path, str]:
    """Return the names, extended so that different folders of one group have different names."""
    members_of: dict[Hashable, dict[Path, Mapping[str, Any]]] = {}
    for folder, config in configs.items():
        members = members_of.setdefault(groups[folder], {})
        members[folder] = config
    longer = dict(names)
    for members in members_of.values():
        for folder, suffix in _suffixes(members).items():
            longer[folder] += suffix
    return longer


def _suffixes(configs: Configs) -> dict[Path, str]:
    """Return the differing keys of folders, in brackets; empty if there are none."""
    keys = _differing_keys(configs)
    if not keys:
        return dict.fromkeys(configs, "")
    values_of: dict[Path, tuple[str, ...]] = {}
    text_of: dict[tuple[str, ...], str] = {}
    for folder, config in configs.items():
        values = tuple(_as_text(config, key) for key in keys)
        values_of[folder] = values
        text_of[values] = _assignments(keys, values)
    texts = list(text_of.values())
    is_ambiguous = len(set(texts)) < len(texts)
    is_long = len(keys) > MAX_KEYS or max(map(len, texts)) > MAX_LETTERS
    if is_ambiguous or is_long:
        # folders that differ in seeds alone have equal values and are named after the first
        for folder in reversed(values_of):
            values = values_of[folder]
            text_of[values] = folder.resolve().name
    suffixes: dict[Path, str] = {}
    for folder, values in values_of.items():
        suffixes[folder] = f" ({text_of[values]})"
    return suffixes


def _differing_keys(configs: Configs) -> list[str]:
    keys: dict[str, None] = {}
    for config in configs.values():
        keys |= dict.fromkeys(config)
    differing: list[str] = []
    for key in keys:
        values: set[str] = set()
        for config in configs.values():
            values.add(_as_text(config, key))
        if len(values) > 1 and not key.startswith(FREE_TO_CHANGE):
            differing.append(key)
    return differing


def _as_text(config: Mapping[str, Any], key: str) -> str:
    if key in config:
        return json.dumps(config[key])
    if key in retired.KEYS:  # a run of today behaves as the retired key's default did
        return json.dumps(retired.KEYS[key].default)
    return "not set"


def _assignments(keys: Sequence[str], values: Sequence[str]) -> str:
    """Write `local.lr=0.0001, agent.history=8`; words go without their quotes."""
    assignments: list[str] = []
    for key, value in zip(keys, values, strict=True):
        assignments.append(f"{key}={_without_quotes(value)}")
    return ", ".join(assignments)


def _without_quotes(text: str) -> str:
    inner = text[1:-1]
    is_quoted_word = text.startswith('"') and inner.isidentifier()
    return inner if is_quoted_word else text
