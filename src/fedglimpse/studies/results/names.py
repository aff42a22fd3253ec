"""Names of settings and variants, for run folders that come without a plan.

A setting is called after its data, a variant after its method. Where that does not tell runs
apart, the keys in which they differ stand behind it: `fedavg (local.lr=0.0001)`.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedglimpse.config import retired
from fedglimpse.runs.folder import FREE_TO_CHANGE

# What all methods of a comparison have in common; every other key belongs to the variant.
SETTING = ("data.", "model.", "visibility.", "selection.", "evaluate.", "rounds")
MOST_KEYS, LONGEST = 3, 60  # of what stands in brackets; more, and it is a folder's name

Configs = Mapping[Path, Mapping[str, Any]]  # folder -> every dotted key


def names_of(configs: Configs) -> dict[Path, tuple[str, str]]:
    """Return setting and variant of every run folder.

    Two folders have the same names only where nothing but seeds, and keys that results do not
    depend on, differs between them.
    """
    bases = {folder: _setting_name(config) for folder, config in configs.items()}
    shared = {f: {k: v for k, v in c.items() if k.startswith(SETTING)} for f, c in configs.items()}
    more = _told_apart(bases, shared)
    settings = {folder: bases[folder] + more[folder] for folder in configs}
    own = {
        f: {k: v for k, v in c.items() if k != "seeds" and not k.startswith(SETTING)}
        for f, c in configs.items()
    }
    more = _told_apart({f: (settings[f], c["method"]) for f, c in configs.items()}, own)
    return {f: (settings[f], str(c["method"]) + more[f]) for f, c in configs.items()}


def _setting_name(config: Mapping[str, Any]) -> str:
    names = ("data.partition", "visibility.kind")
    words = [str(config[name]).replace("_", " ") for name in names]
    return " ".join([str(config["data.name"]), *words])


def _told_apart(groups: Mapping[Path, Hashable], configs: Configs) -> dict[Path, str]:
    """Return what to add to the names of folders so that those of one group are told apart."""
    found: dict[Path, str] = {}
    for group in dict.fromkeys(groups.values()):
        found |= _brackets({f: c for f, c in configs.items() if groups[f] == group})
    return found


def _brackets(configs: Configs) -> dict[Path, str]:
    """Return the differing keys of folders that would have the same name; nothing if none."""
    names = dict.fromkeys(k for c in configs.values() for k in c)
    values = {f: {k: _written(c, k) for k in names} for f, c in configs.items()}
    first = next(iter(values.values()))
    keys = [
        k
        for k in names
        if not k.startswith(FREE_TO_CHANGE) and any(v[k] != first[k] for v in values.values())
    ]
    if not keys:
        return dict.fromkeys(configs, "")
    kinds = {f: tuple(v[k] for k in keys) for f, v in values.items()}
    texts = {kind: _said(keys, kind) for kind in kinds.values()}
    alike = len(set(texts.values())) < len(texts)
    if alike or len(keys) > MOST_KEYS or max(map(len, texts.values())) > LONGEST:
        # folders that differ in seeds alone are one kind, called after the first of them
        texts = {kind: folder.resolve().name for folder, kind in reversed(kinds.items())}
    return {folder: f" ({texts[kind]})" for folder, kind in kinds.items()}


def _written(config: Mapping[str, Any], key: str) -> str:
    if key in retired.KEYS and key not in config:  # a run of today does what the default did
        return json.dumps(retired.KEYS[key].default)
    return json.dumps(config[key]) if key in config else "not set"


def _said(keys: Sequence[str], kind: Sequence[str]) -> str:
    """Write `local.lr=0.0001, agent.history=8`; words go without their quotes."""
    return ", ".join(f"{k}={_bare(v)}" for k, v in zip(keys, kind, strict=True))


def _bare(text: str) -> str:
    return text[1:-1] if text.startswith('"') and text[1:-1].isidentifier() else text
