"""A JSON Schema of configuration files, for editors that complete and check TOML."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fedglimpse.config.retired import KEYS, Retired
from fedglimpse.config.schema import Config
from fedglimpse.fields import Allowed, allowed_of

Schema = dict[str, Any]

TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string"}
PLUGIN_PATTERN = "^[^:]+:[^:]+$"  # package.module:name


def config_schema() -> Schema:
    """Return the JSON Schema (draft 7) of a file that `fedglimpse run FILE.toml` takes."""
    schema = _table(Config)
    schema["properties"]["options"] = _options()
    for key, entry in KEYS.items():
        _add_retired(schema, key, entry)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of a fedglimpse run",
        **schema,
    }


def _table(config_class: type[Any]) -> Schema:
    """Return the schema of a dataclass: an object with a property for each field."""
    types = get_type_hints(config_class)
    properties: Schema = {}
    for item in dataclasses.fields(config_class):
        allowed = allowed_of(item)
        if dataclasses.is_dataclass(types[item.name]):
            properties[item.name] = _table(types[item.name])
        elif allowed is not None:
            value = _value(types[item.name], allowed)
            properties[item.name] = {**value, "description": allowed.meaning}
    summary = (inspect.getdoc(config_class) or "").partition("\n")[0]
    return {
        "type": "object",
        "description": summary,
        "properties": properties,
        "additionalProperties": False,
    }


def _value(kind: Any, allowed: Allowed) -> Schema:
    """Return the schema of one setting."""
    if get_origin(kind) is UnionType:
        return {"anyOf": [_value(member, allowed) for member in get_args(kind)]}
    if get_origin(kind) is tuple:
        element = get_args(kind)[0]
        return {"type": "array", "items": {"type": TYPE_NAMES[element]}}
    if kind is str:
        return _text(allowed.choices, allowed.plugin)
    schema: Schema = {"type": TYPE_NAMES[kind]}
    limits = {
        "minimum": allowed.at_least,
        "maximum": allowed.at_most,
        "exclusiveMinimum": allowed.above,
        "exclusiveMaximum": allowed.below,
    }
    for name, limit in limits.items():
        if limit is not None:
            schema[name] = limit
    return schema


def _text(choices: Collection[str], plugin: bool) -> Schema:
    if not choices:
        return {"type": "string"}
    one_of_ours: Schema = {"enum": list(choices)}
    if not plugin:
        return one_of_ours
    return {"anyOf": [one_of_ours, {"type": "string", "pattern": PLUGIN_PATTERN}]}


def _options() -> Schema:
    """Return the schema of `options.*`, which depend on the method."""
    return {
        "type": "object",
        "description": "options of the method; see its page in docs/methods",
        "additionalProperties": {"type": ["number", "string", "boolean", "array"]},
    }


def _add_retired(schema: Schema, key: str, entry: Retired) -> None:
    """Allow a retired setting at the value that the code still has."""
    *groups, name = key.split(".")
    table = schema
    for group in groups:
        table = table["properties"].setdefault(group, {"type": "object", "properties": {}})
    table["properties"][name] = {"const": entry.default, "description": f"retired: {entry.lesson}"}
