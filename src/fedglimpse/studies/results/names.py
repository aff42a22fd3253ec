"""Names of settings and variants, for run folders that come without a plan.

A setting is named after its data, a variant after its method. If that does not distinguish two
runs, the keys in which they differ are added: `fedavg (local.lr=0.0001)`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedglimpse.config import retired
from fedglimpse.runs.folder import FREE_TO_CHANGE

# What all methods of a comparison have in common; every other key belongs to the variant.
SETTING = ("data.", "model.", "visibility.", "selection.", "evaluate.", "rounds")
MAX_KEYS = 3  # of the differing keys in brackets; if there are more, the folder's name is used
MAX_LETTERS = 60  # in brackets

Configs = Mapping[Path, Mapping[str, Any]]  # folder -> every dotted key


def names_of(configs: Configs) -> dict[Path, tuple[str, str]]:
    """Return setting and variant of every run folder.

    Two folders have the same names only if nothing but seeds, and keys that results do not depend
    on, differs between them.
    """
    setting_names: dict[Path, str] = {}
    for folder, config in configs.items():
        setting_names[folder] = _setting_name(config)
    setting_names = _distinguished(setting_names, setting_names, _restricted(configs, _is_setting))
    variant_names: dict[Path, str] = {}
    groups: dict[Path, tuple[str, str]] = {}
    for folder, config in configs.items():
        variant_names[folder] = str(config["method"])
        groups[folder] = setting_names[folder], config["method"]
    variant_names = _distinguished(variant_names, groups, _restricted(configs, _is_variant))
    names: dict[Path, tuple[str, str]] = {}
    for folder in configs:
        names[folder] = setting_names[folder], variant_names[folder]
    return names


def _is_setting(key: str) -> bool:
    return key.startswith(SETTING)


def _is_variant(key: str) -> bool:
    return key != "seeds" and not _is_setting(key)


def _restricted(configs: Configs, belongs: Callable[[str], bool]) -> dict[Path, dict[str, Any]]:
    """Return the configurations with only those keys that belong."""
    restricted: dict[Path, dict[str, Any]] = {}
    for folder, config in configs.items():
        restricted[folder] = {key: value for key, value in config.items() if belongs(key)}
    return restricted


def _setting_name(config: Mapping[str, Any]) -> str:
    partition = str(config["data.partition"]).replace("_", " ")
    visibility = str(config["visibility.kind"]).replace("_", " ")
    return f"{config['data.name']} {partition} {visibility}"


def _distinguished(
    names: Mapping[Path, str], groups: Mapping[Path, Hashable], configs: Configs
) -> dict[Path, str]:
    """Return the names, extended so that different folders of one group have different names."""
    longer = dict(names)
    for group in set(groups.values()):
        members = {folder: configs[folder] for folder in configs if groups[folder] == group}
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
    is_ambiguous = len(set(text_of.values())) < len(text_of)
    if is_ambiguous or len(keys) > MAX_KEYS or max(map(len, text_of.values())) > MAX_LETTERS:
        # folders that differ in seeds alone have equal values and are named after the first
        for folder in reversed(values_of):
            text_of[values_of[folder]] = folder.resolve().name
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
    return text[1:-1] if text.startswith('"') and text[1:-1].isidentifier() else text
