"""Filling the configuration tree: presets, a TOML file, `key=value` overrides.

In rising order: the defaults of `config/schema.py`, what suits the dataset, the preset, the file,
the overrides. An unknown key is an error that names the nearest one, and a TOML file that cannot be
read is an error of one sentence.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedglimpse.config import retired
from fedglimpse.config.presets import DATASET_DEFAULTS, DEFAULT_PRESET, PRESETS
from fedglimpse.config.schema import Config, flatten
from fedglimpse.errors import UserError, nearest, require
from fedglimpse.fields import check_fields

LARGEST_NUMBER = 3.4e38  # models are float32
OPTION = re.compile(r"options\.[A-Za-z0-9_-]+")
KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def load(
    file: Path | str | None = None,
    words: Iterable[str] = (),
    otherwise: Mapping[str, Any] | None = None,
) -> Config:
    """Build a configuration from a TOML file and `key=value` overrides, both optional.

    Args:
        file: read first.
        words: the overrides, which win over the file.
        otherwise: dotted keys for what neither says.
    """
    values = dict(otherwise or {})
    if file is not None:
        values |= read_toml(Path(file))
    return resolve(values | parse_overrides(words))


def resolve(values: Mapping[str, Any]) -> Config:
    """Build a configuration from dotted keys, filling in dataset and preset values.

    Raises:
        UserError: for an unknown key or preset, a value of the wrong type, or a retired setting.
    """
    values = retired.runnable(values)
    _check_names(values)
    preset = str(values.get("preset", DEFAULT_PRESET))
    if preset not in PRESETS:
        raise UserError(
            f"Unknown preset '{preset}'.{nearest(preset, PRESETS)} Known: {', '.join(PRESETS)}.",
            key="preset",
        )
    of_dataset = DATASET_DEFAULTS.get(str(values.get("data.name", "digits")), {})
    return build({**of_dataset, **PRESETS[preset], **values, "preset": preset})


def build(values: Mapping[str, Any]) -> Config:
    """Build a configuration from dotted keys over the plain defaults, checking types.

    Raises:
        UserError: for an unknown key, a value of the wrong type, or a retired setting.
    """
    values = retired.runnable(values)
    _check_names(values)
    config: Config = _fill(Config, values, "")
    return config


@dataclasses.dataclass(frozen=True)
class StoredConfig:
    """The configuration of a run that is only read, so retired settings do no harm."""

    config: Config  # with the defaults of retired settings
    retired: Mapping[str, Any]  # retired settings, as they are stored

    def flat(self) -> dict[str, Any]:
        """Return every dotted key with its value as stored."""
        return {**self.config.flat(), **self.retired}


def read_stored(values: Mapping[str, Any]) -> StoredConfig:
    """Like `build`, for reading what was run: retired settings are shown and never refused."""
    old, live = _split_retired(values)
    return StoredConfig(build(live), old)


def resolve_stored(values: Mapping[str, Any]) -> StoredConfig:
    """Like `resolve`, for reading the plan of runs that exist: no retired setting is refused."""
    old, live = _split_retired(values)
    return StoredConfig(resolve(live), old)


def _split_retired(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the retired settings and the others."""
    old: dict[str, Any] = {}
    live: dict[str, Any] = {}
    for key, value in values.items():
        settings = old if retired.is_retired(key, value) else live
        settings[key] = value
    return old, live


def parse_overrides(words: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` overrides; a value is TOML where it parses as such, else a plain string."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        require(bool(equals and name), f"'{word}' is not of the form key=value, such as rounds=30.")
        _check_text(word, name)
        try:
            values[name.strip()] = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            values[name.strip()] = text
    return values


def _check_text(word: str, key: str) -> None:
    """Raise UserError for bytes that Python could not decode: config.toml cannot hold them."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{word!r} has characters that are not in this terminal's encoding, "
            f"{sys.getfilesystemencoding()}: use others, or set LC_ALL=C.UTF-8 if it is UTF-8.",
            key=key,
        ) from None


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file into dotted keys."""
    return flatten(read_table(file))


def options_of(cls: type[Any], config: Config, preset: Mapping[str, Any] | None = None) -> Any:
    """Read `options.*` into a method's own dataclass, checking names, types and ranges.

    Args:
        cls: the method's options, a dataclass of plain fields with defaults.
        config: the run's configuration.
        preset: what the configured preset says instead of the defaults.
    """
    names = [item.name for item in dataclasses.fields(cls)]
    values: dict[str, Any] = {}
    for name, value in {**(preset or {}), **config.options}.items():
        hint = nearest(name, names) or f" It has: {', '.join(names) or 'none'}."
        require(
            name in names,
            f"method={config.method} has no option 'options.{name}'.{hint}",
            key=f"options.{name}",
        )
        values[f"options.{name}"] = value
    options = _fill(cls, values, "options.")
    check_fields(options, "options.")
    return options


@cache
def _known_keys() -> Mapping[str, Any]:
    """Return every dotted key but those of options, with its default."""
    return Config().flat()


@cache
def _types_of(cls: type[Any]) -> Mapping[str, Any]:
    """Return the type of each field of a dataclass."""
    return get_type_hints(cls)


def _check_names(values: Mapping[str, Any]) -> None:
    keys = _known_keys()
    for name, value in values.items():
        if name.startswith("options."):
            _check_option(name, value)
        elif name not in keys:  # no `require`: it would search `nearest` for every known name too
            raise UserError(f"Unknown key '{name}'.{nearest(name, keys)}", key=name)


def _check_option(name: str, value: Any) -> None:
    require(
        OPTION.fullmatch(name) is not None,
        f"'{name}' is not the name of an option: use letters, digits, _ and -, such as "
        "options.rate.",
        key=name,
    )
    require(
        _storable(value),
        f"{name}={value!r} is neither a number, text, true or false, nor a list of these: give "
        "one of them.",
        key=name,
    )


def _storable(value: Any) -> bool:
    """True for what config.toml can hold."""
    if isinstance(value, list | tuple):
        return all(map(_storable, value))
    return isinstance(value, bool | int | float | str)


def _fill(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    """Build a dataclass, and those it is made of, from dotted keys that begin with `prefix`."""
    types = _types_of(cls)  # type: ignore[arg-type]  # a class can be hashed
    arguments: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        key = f"{prefix}{item.name}"
        if key == "options":
            arguments["options"] = _options(values)
        elif dataclasses.is_dataclass(types[item.name]):
            arguments[item.name] = _fill(types[item.name], values, f"{key}.")
        elif key in values:
            arguments[item.name] = _typed(key, values[key], types[item.name])
    return cls(**arguments)


def _options(values: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith("options."):
            options[key.removeprefix("options.")] = value
    return options


def _typed(key: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type of the field, or raise UserError."""
    container = get_origin(hint) or hint
    if container in (tuple, list):
        element = next(iter(get_args(hint)), Any)
        is_list = isinstance(value, list | tuple)
        require(is_list, f"{key}={value!r} must be a list, such as {key}=[0,1].", key=key)
        return container(_typed(key, entry, element) for entry in value)
    if container is Literal:
        choices = get_args(hint)
        names = ", ".join(map(str, choices))
        require(value in choices, f"{key}={value!r} is unknown: use one of {names}.", key=key)
        return value
    if container in (Union, UnionType):
        if type(value) in get_args(hint):
            return value
        hint = next(member for member in get_args(hint) if member is not type(None))
    return value if hint is Any else _plain(key, value, hint)


def _plain(key: str, value: Any, hint: type[Any]) -> Any:
    """Return a number, text or a truth value as the type of the field, or raise UserError."""
    settable = "numbers, text, true or false, lists of these or Literal"
    require(
        hint in KIND_NAMES,
        f"{key} is a field of {hint}, which cannot be set: use {settable}.",
        key=key,
    )
    if hint is float and type(value) is int:
        return float(value)
    require(type(value) is hint, f"{key}={value!r} must be {KIND_NAMES[hint]}.", key=key)
    if isinstance(value, float):
        require(math.isfinite(value), f"{key}={value} must be a finite number.", key=key)
        require(
            abs(value) <= LARGEST_NUMBER,
            f"{key}={value:g} is beyond the range of float32: use at most {LARGEST_NUMBER:g}.",
            key=key,
        )
    return value


def read_table(file: Path, expected: str = "TOML file") -> dict[str, Any]:
    """Return the file's tables as they are.

    Args:
        file: what a user named.
        expected: what it should have been, for the error message.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problem = f"There is no file {file}: give the path of a {expected}."
    except IsADirectoryError:
        problem = f"{file} is a folder: give the path of a {expected}."
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        problem = f"{file} cannot be read ({reason}): fix access, or give another {expected}."
    except UnicodeDecodeError as error:
        problem = f"{file} is not UTF-8 ({error.reason}): save it as UTF-8."
    except tomllib.TOMLDecodeError as error:
        problem = f"{file} is not valid TOML: {error}."
    raise UserError(problem)
