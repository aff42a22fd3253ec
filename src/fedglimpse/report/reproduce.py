"""The command that repeats a run: only what differs from the defaults of its preset and data."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from fedglimpse.config import Config
from fedglimpse.configure import resolve
from fedglimpse.records import FREE_TO_CHANGE

NAMED_ANYWAY = ("data.name", "method", "rounds")
DEFAULT_PRESET = Config().preset


def command(config: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """Return `fedglimpse run ...` for these seeds of a configuration of dotted keys."""
    start = {"preset": config["preset"], "data.name": config["data.name"]}
    usual = {k: _plain(v) for k, v in resolve(start).flat().items()}
    words = []
    for key, value in config.items():
        free = key == "seeds" or key.startswith(FREE_TO_CHANGE)
        if key == "preset":
            told = value != DEFAULT_PRESET
        else:
            told = key in NAMED_ANYWAY or key not in usual or usual[key] != _plain(value)
        if told and not free:
            words.append(f"{key}={_written(value)}")
    words.append("seeds=" + json.dumps(list(seeds), separators=(",", ":")))
    return "fedglimpse run " + " ".join(shlex.quote(word) for word in words)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _written(value: Any) -> str:
    """Write a value so that `configure.parse_words` reads it back as it was."""
    if not isinstance(value, str):
        return json.dumps(_plain(value))
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return json.dumps(value)  # a word that would be read as a number or a list
