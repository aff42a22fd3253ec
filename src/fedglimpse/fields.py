"""Declaring a setting: its default, its meaning and the values it may have, in one place.

Configurations are frozen dataclasses whose fields are made by `setting`. Whatever needs to know
what a setting may be reads it here: `check_fields` before a run, the tables of docs/settings.md and
the JSON Schema for editors (`config/schema.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from fedglimpse.errors import nearest, require

_METADATA = "setting"  # where a dataclass field keeps its `Allowed`


@dataclass(frozen=True)
class Allowed:
    """What a setting means and which values it may have.

    Attributes:
        meaning: one line for the documentation.
        choices: the words it may be; empty: any text.
        at_least: smallest number.
        at_most: largest number.
        above: the number must be greater.
        below: the number must be smaller.
        plugin: a user's own code, "package.module:name", is allowed too.
    """

    meaning: str
    choices: Collection[str] = ()
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    plugin: bool = False

    def problem(self, value: object, default: object) -> str:
        """Return what is wrong with a value, to stand behind `key=value`; empty if nothing is."""
        if isinstance(value, str):
            return self._problem_of_text(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._problem_of_number(value, default)
        return ""

    def _problem_of_text(self, value: str) -> str:
        if not self.choices or value in self.choices:
            return ""
        if self.plugin and ":" in value:
            return ""
        allowed = ", ".join(filter(None, self.choices))
        if self.plugin:
            allowed += " or your own as package.module:name"
        if self.range_text():
            allowed += f" or a number, {self.range_text()}"
        return f"is unknown.{nearest(value, self.choices)} Use {allowed}."

    def _problem_of_number(self, value: float, default: object) -> str:
        if not math.isfinite(value):
            return "must be a finite number."
        if self.contains(value):
            return ""
        return f"must be {self.range_text()}, such as {default}."

    def contains(self, value: float) -> bool:
        """True for a number within the limits."""
        high_enough = self.at_least is None or value >= self.at_least
        low_enough = self.at_most is None or value <= self.at_most
        above = self.above is None or value > self.above
        below = self.below is None or value < self.below
        return high_enough and low_enough and above and below

    def range_text(self) -> str:
        """Return the limits in words, such as `1 or more`; empty where there are none."""
        lower = self.at_least if self.above is None else self.above
        upper = self.at_most if self.below is None else self.below
        if lower is None:
            return ""
        if upper is None:
            return f"{lower} or more" if self.above is None else f"greater than {lower}"
        opening = "[" if self.above is None else "("
        closing = "]" if self.below is None else ")"
        return f"in {opening}{lower}, {upper}{closing}"


def setting(
    default: Any,
    meaning: str,
    *,
    choices: Collection[str] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    plugin: bool = False,
) -> Any:
    """Declare a field of a configuration dataclass; see `Allowed` for the arguments."""
    allowed = Allowed(meaning, choices, at_least, at_most, above, below, plugin)
    return dataclasses.field(default=default, metadata={_METADATA: allowed})


def allowed_of(item: dataclasses.Field[Any]) -> Allowed | None:
    """Return what a dataclass field may be; None where it was not declared by `setting`."""
    return item.metadata.get(_METADATA)


def settings_of(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Yield every field of a tree of configuration dataclasses with its dotted key."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", item


def check_fields(config: Any, prefix: str = "") -> None:
    """Raise UserError for the first value that its field does not allow.

    Args:
        config: an instance of a configuration dataclass; its parts are checked too.
        prefix: how the dotted keys of its fields begin, such as "agent.".
    """
    for item in dataclasses.fields(config):
        key = f"{prefix}{item.name}"
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{key}.")
        allowed = allowed_of(item)
        if allowed is not None:
            problem = allowed.problem(value, item.default)
            require(not problem, f"{key}={value} {problem}", key=key)
