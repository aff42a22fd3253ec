"""The settings of docs/settings.md: every key of `Config`, from its dataclasses and their comments.

A field's meaning is the comment behind it in `config/schema.py` or `agent/config.py`; the values it
may have are those that `config/checks.py` and `agent/config.py` check.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from fedglimpse.agent import config as rl
from fedglimpse.config import checks as validate
from fedglimpse.config.presets import DATASET_DEFAULTS, DEFAULT_PRESET, PRESETS
from fedglimpse.config.schema import Config, _toml

FIELD = re.compile(r"    (\w+): [^#]*  # (.+)")  # a field and the comment behind it
Value = TypeVar("Value")
LEFT_OUT = ("options",)  # the method's own; the page tells of them


def meanings(cls: type[Any] = Config, prefix: str = "") -> dict[str, str]:
    """Return every dotted key with the comment behind its field; empty where there is none."""
    hints, said = get_type_hints(cls), _comments(cls)
    found: dict[str, str] = {}
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[item.name]):
            found |= meanings(hints[item.name], f"{prefix}{item.name}.")
        elif item.name not in LEFT_OUT:
            found[f"{prefix}{item.name}"] = said.get(item.name, "")
    return found


def settings_table() -> str:
    """Return a table for each group of keys, and what datasets say instead."""
    told = meanings()
    defaults = {**Config().flat(), **PRESETS[DEFAULT_PRESET], "preset": DEFAULT_PRESET}
    lines = []
    for heading, keys in _groups(told).items():
        lines += [f"## {heading}", "", "| key | default | values | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{key}` | `{_toml(defaults[key])}` | {_values(key, defaults[key])} | "
            f"{_cell(told[key])} |"
            for key in keys
        ]
        lines.append("")
    lines += ["## What datasets say instead", "", "| `data.name` | settings |", "|---|---|"]
    for name, values in DATASET_DEFAULTS.items():
        words = " ".join(f"`{key}={_toml(value)}`" for key, value in values.items())
        lines.append(f"| `{name}` | {words} |")
    return "\n".join(lines)


def _comments(cls: type[Any]) -> dict[str, str]:
    """Return the comments behind the fields of a class and of those it is made from."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__[:-1]):
        found |= dict(FIELD.findall(inspect.getsource(part)))
    return found


def _groups(keys: dict[str, str]) -> dict[str, list[str]]:
    """Return keys by heading: the first line of what their class says of itself."""
    hints, groups = get_type_hints(Config), dict[str, list[str]]()
    for key in keys:
        group, dot, _ = key.partition(".")
        said = (inspect.getdoc(hints[group]) or "").partition("\n")[0] if dot else "The run"
        groups.setdefault(said.rstrip("."), []).append(key)
    return groups


def _values(key: str, default: Any) -> str:
    """Return what a key may be, as far as it can be listed or said in a few words."""
    words = {"preset": tuple(PRESETS), **validate.CHOICES, **_of_agent(rl.CHOICES)}
    least = {**validate.AT_LEAST, **_of_agent(rl.LEAST)}
    said = {name: wanted.partition(", such as")[0] for name, _, wanted in validate.NUMBERS}
    if key in words:
        return ", ".join(f"`{word}`" for word in words[key])
    if key in said:
        return said[key]
    if key in (shares := _of_agent(rl.SHARES)):
        zero, one = shares[key]
        return f"in {'[' if zero else '('}0, 1{']' if one else ')'}"
    if key in least:
        return f"{least[key]} or more"
    kinds = {bool: "`true`, `false`", int: "a whole number", float: "a number", tuple: "a list"}
    return kinds.get(type(default), "text")


def _of_agent(values: Mapping[str, Value]) -> dict[str, Value]:
    return {f"agent.{name}": value for name, value in values.items()}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
