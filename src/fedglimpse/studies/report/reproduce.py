"""The command that repeats a run, with only what differs from the defaults of its preset."""

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

ALWAYS_NAMED = ("data.name", "method", "rounds")


def command(config: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """Return `fedglimpse run ...` for these seeds of a configuration of dotted keys.

    A preset that only sets values may have set others when the run was made; then the preset that
    needs the fewest overrides is named.
    """
    preset = config["preset"]
    presets = VALUES_ALONE if preset in VALUES_ALONE else (preset,)
    overrides = min((_overrides(config, name) for name in presets), key=len)
    overrides.append("seeds=" + json.dumps(list(seeds), separators=(",", ":")))
    return "fedglimpse run " + shlex.join(overrides)


def _overrides(config: Mapping[str, Any], preset: str) -> list[str]:
    """Return what has to be set, beside a preset, to have this configuration."""
    defaults = resolve({"preset": preset, "data.name": config["data.name"]}).flat()
    overrides = [] if preset == DEFAULT_PRESET else [f"preset={preset}"]
    for key, value in retired.without_defaults(config).items():
        if key in ("preset", "seeds") or key.startswith(FREE_TO_CHANGE):
            continue
        is_default = key in defaults and _as_list(defaults[key]) == _as_list(value)
        if key in ALWAYS_NAMED or not is_default:
            overrides.append(f"{key}={_as_word(value)}")
    return overrides


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _as_word(value: Any) -> str:
    """Write a value so that `config.loading.parse_overrides` reads it back as it was."""
    if not isinstance(value, str):
        return json.dumps(_as_list(value))
    try:
        tomllib.loads(f"x = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return json.dumps(value)  # a text that would be read as a number or a list
