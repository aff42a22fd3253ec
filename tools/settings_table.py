"""The tables of docs/settings.md: every setting with default, values and meaning.

Everything is read from the fields of `Config`, which `fedglimpse.fields.setting` declares.
"""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from fedglimpse.config.presets import DATASET_DEFAULTS, DEFAULT_PRESET, PRESETS
from fedglimpse.config.schema import Config, toml_value
from fedglimpse.fields import Allowed, allowed_of, settings_of

HEAD = ["| key | default | values | meaning |", "|---|---|---|---|"]


def meanings() -> dict[str, str]:
    """Return every dotted key with its meaning."""
    return {key: allowed.meaning for key, allowed in _settings().items()}


def settings_table() -> str:
    """Return a table for each group of keys, and what datasets say instead."""
    defaults = {**Config().flat(), **PRESETS[DEFAULT_PRESET], "preset": DEFAULT_PRESET}
    lines: list[str] = []
    heading = ""
    for key, allowed in _settings().items():
        if _heading(key) != heading:
            heading = _heading(key)
            lines += ["", f"## {heading}", "", *HEAD]
        default = f"`{toml_value(defaults[key])}`"
        meaning = allowed.meaning.replace("|", "\\|")
        lines.append(f"| `{key}` | {default} | {_values(allowed, defaults[key])} | {meaning} |")
    return "\n".join([*lines[1:], "", *_dataset_table()])


def _settings() -> dict[str, Allowed]:
    """Return what is declared of every key; options of methods stand on the methods' pages."""
    declared: dict[str, Allowed] = {}
    for key, item in settings_of(Config()):
        allowed = allowed_of(item)
        if allowed is not None:
            declared[key] = allowed
    return declared


def _heading(key: str) -> str:
    """Return the first line of what the key's class says of itself."""
    group, dot, _ = key.partition(".")
    if not dot:
        return "The run"
    group_class = get_type_hints(Config)[group]
    return (inspect.getdoc(group_class) or "").partition("\n")[0].rstrip(".")


def _values(allowed: Allowed, default: Any) -> str:
    """Return what a setting may be, in a few words."""
    words = [f"`{choice or toml_value(choice)}`" for choice in allowed.choices]
    if allowed.range_text():
        words.append(allowed.range_text())
    if allowed.plugin and allowed.choices:
        words.append('`"pkg.mod:name"`')
    if words:
        return ", ".join(words)
    kinds = {bool: "`true`, `false`", int: "a whole number", float: "a number", tuple: "a list"}
    return kinds.get(type(default), "text")


def _dataset_table() -> list[str]:
    lines = ["## What datasets say instead", "", "| `data.name` | settings |", "|---|---|"]
    for name, values in DATASET_DEFAULTS.items():
        words = " ".join(f"`{key}={toml_value(value)}`" for key, value in values.items())
        lines.append(f"| `{name}` | {words} |")
    return lines
