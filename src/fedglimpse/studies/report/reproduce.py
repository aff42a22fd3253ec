"""The command that repeats a run: only what differs from the defaults of its preset and data."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from fedglimpse.config import retired
from fedglimpse.config.loading import resolve
from fedglimpse.config.presets import DEFAULT_PRESET, VALUES_ALONE
from fedglimpse.runs.folder import FREE_TO_CHANGE

NAMED_ANYWAY = ("data.name", "method", "rounds")


def command(config: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """Return `fedglimpse run ...` for these seeds of a configuration of dotted keys.

    A preset that only stands for values may have meant others once; then the one that is nearest
    is named.
    """
    preset = config["preset"]
    presets = VALUES_ALONE if preset in VALUES_ALONE else (preset,)
    words = min((_words(config, name) for name in presets), key=len)
    words.append("seeds=" + json.dumps(list(seeds), separators=(",", ":")))
    return "fedglimpse run " + " ".join(shlex.quote(word) for word in words)


def _words(config: Mapping[str, Any], preset: str) -> list[str]:
    """Return what has to be said, beside a preset, to have this configuration."""
    usual = resolve({"preset": preset, "data.name": config["data.name"]}).flat()
    words = [] if preset == DEFAULT_PRESET else [f"preset={preset}"]
    for key, value in retired.without_defaults(config).items():
        free = key in ("preset", "seeds") or key.startswith(FREE_TO_CHANGE)
        told = key in NAMED_ANYWAY or key not in usual or _plain(usual[key]) != _plain(value)
        if told and not free:
            words.append(f"{key}={_written(value)}")
    return words


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
