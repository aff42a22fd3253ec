"""Filling the configuration tree: presets, a TOML file, `key=value` words.

In rising order: the defaults of `config/schema.py`, what suits the dataset, the preset, the file,
the words. An unknown key is an error that names the nearest one.

Reading a TOML file; whatever is wrong with it is one sentence.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedglimpse.config import retired
from fedglimpse.config.presets import DATASET_DEFAULTS, DEFAULT_PRESET, PRESETS
from fedglimpse.config.schema import Config, flatten
from fedglimpse.errors import UserError, nearest

OPTION = re.compile(r"options\.[A-Za-z0-9_-]+")


def load(
    file: Path | str | None = None,
    words: Iterable[str] = (),
    otherwise: Mapping[str, Any] | None = None,
) -> Config:
    """Build a configuration from a TOML file and `key=value` words, both optional.

    Args:
        file: read first.
        words: win over the file.
        otherwise: dotted keys for what neither says.
    """
    values = read_toml(Path(file)) if file is not None else {}
    return resolve({**(otherwise or {}), **values, **parse_words(words)})


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
            f"Unknown preset '{preset}'.{nearest(preset, PRESETS)} Known: {', '.join(PRESETS)}."
        )
    suited = DATASET_DEFAULTS.get(str(values.get("data.name", "digits")), {})
    return build({**suited, **PRESETS[preset], **values, "preset": preset})


def build(values: Mapping[str, Any]) -> Config:
    """Build a configuration from dotted keys over the plain defaults, checking types.

    Raises:
        UserError: for an unknown key, a value of the wrong type, or a retired setting.
    """
    values = retired.runnable(values)
    _check_names(values)
    return _fill(Config, values, "")


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
    old, live = _apart(values)
    return StoredConfig(build(live), old)


def resolve_stored(values: Mapping[str, Any]) -> StoredConfig:
    """Like `resolve`, for reading the plan of runs that exist: no retired setting is refused."""
    old, live = _apart(values)
    return StoredConfig(resolve(live), old)


def _apart(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the retired settings and the others."""
    old: dict[str, Any] = {}
    live: dict[str, Any] = {}
    for key, value in values.items():
        part = old if retired.is_retired(key, value) else live
        part[key] = value
    return old, live


def parse_words(words: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` words; a value is TOML where it parses as such, else a plain string."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise UserError(f"'{word}' is not of the form key=value, such as rounds=30.")
        _check_text(word)
        try:
            values[name.strip()] = tomllib.loads(f"x = {text}")["x"]
        except tomllib.TOMLDecodeError:
            values[name.strip()] = text
    return values


def _check_text(word: str) -> None:
    """Raise UserError for bytes that Python could not decode: config.toml cannot hold them."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{word!r} has characters that are not in this terminal's encoding, "
            f"{sys.getfilesystemencoding()}: use others, or set LC_ALL=C.UTF-8 if it is UTF-8."
        ) from None


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file into dotted keys."""
    return flatten(read_table(file))


def options_of(cls: type[Any], config: Config, preset: Mapping[str, Any] | None = None) -> Any:
    """Read `options.*` into a method's own dataclass, checking names and types.

    Args:
        cls: the method's options, a dataclass of plain fields with defaults.
        config: the run's configuration.
        preset: what the configured preset says instead of the defaults.
    """
    values = {**(preset or {}), **config.options}
    known = [item.name for item in dataclasses.fields(cls)]
    for name in values:
        if name not in known:
            hint = nearest(name, known) or f" It has: {', '.join(known) or 'none'}."
            raise UserError(f"method={config.method} has no option 'options.{name}'.{hint}")
    return _fill(cls, {f"options.{name}": value for name, value in values.items()}, "options.")


def _check_names(values: Mapping[str, Any]) -> None:
    known = Config().flat()
    for name in values:
        if name not in known and not name.startswith("options."):
            raise UserError(f"Unknown key '{name}'.{nearest(name, known)}")
        if name.startswith("options.") and not OPTION.fullmatch(name):
            raise UserError(
                f"'{name}' is not the name of an option: use letters, digits, _ and -, such as "
                "options.rate."
            )
        if name.startswith("options.") and not _storable(values[name]):
            raise UserError(
                f"{name}={values[name]!r} is neither a number, a word, true or false, nor a list "
                "of these: give one of them."
            )


def _storable(value: Any) -> bool:
    """True for what config.toml can hold."""
    if isinstance(value, list | tuple):
        return all(map(_storable, value))
    return isinstance(value, bool | int | float | str)


def _fill(cls: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    hints = get_type_hints(cls)
    arguments = {}
    for item in dataclasses.fields(cls):
        name = f"{prefix}{item.name}"
        if name == "options":
            own = {k: v for k, v in values.items() if k.startswith("options.")}
            arguments[item.name] = {k.removeprefix("options."): v for k, v in own.items()}
        elif dataclasses.is_dataclass(hints[item.name]):
            arguments[item.name] = _fill(hints[item.name], values, f"{name}.")
        elif name in values:
            arguments[item.name] = _typed(name, values[name], hints[item.name])
    return cls(**arguments)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type of the field, or raise UserError."""
    if (kind := get_origin(hint) or hint) in (tuple, list):
        inner = next(iter(get_args(hint)), Any)
        if isinstance(value, list | tuple):
            return kind(_typed(name, v, inner) for v in value)
        raise UserError(f"{name}={value!r} must be a list, such as {name}=[0,1].")
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        known = ", ".join(map(str, get_args(hint)))
        raise UserError(f"{name}={value!r} is unknown: use one of {known}.")
    if hint is Any:
        return value
    if get_origin(hint) in (Union, UnionType):
        if type(value) in get_args(hint):
            return value
        hint = next(h for h in get_args(hint) if h is not type(None))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is hint:
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name}={value} must be a finite number.")
        return value
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    if hint not in wanted:
        told = "numbers, words, true or false, lists of these or Literal"
        raise UserError(f"{name} is a field of {hint}, which nobody can set: have {told}.")
    raise UserError(f"{name}={value!r} must be {wanted[hint]}.")


def read_table(file: Path, wanted: str = "TOML file") -> dict[str, Any]:
    """Return the file's tables as they are.

    Args:
        file: what a user named.
        wanted: what it should have been, for the error message.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no file {file}: give the path of a {wanted}.") from None
    except IsADirectoryError:
        raise UserError(f"{file} is a folder: give the path of a {wanted}.") from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise UserError(
            f"{file} cannot be read ({reason}): mend access, or give another {wanted}."
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 ({error.reason}): save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is not valid TOML: {error}.") from None
