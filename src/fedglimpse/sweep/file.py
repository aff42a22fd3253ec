"""Reading a sweep file: its keys and the kind of value that each of them takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedglimpse.errors import UserError, nearest
from fedglimpse.toml import read_table

LONGEST_VALUE = 60  # letters of a value that an error shows


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(_is_word(v) for v in value)


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(_is_table(v) for v in value)


def _anything(value: Any) -> bool:
    return True


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "title": (_anything, ""),
    "claim": (_anything, ""),
    "control": (_is_word, 'the name of a variant, such as control = "fedavg"'),
    "paper": (_is_word, 'the name of a file beside this one, such as paper = "paper_x.toml"'),
    "from": (_is_word, 'the name of a file beside this one, such as from = "other.toml"'),
    "pick_settings": (_are_words, 'a list of names, such as pick_settings = ["a"]'),
    "pick_variants": (_are_words, 'a list of names, such as pick_variants = ["a"]'),
    "methods": (_are_words, 'a list of names, such as methods = ["fedavg"]'),
    "base": (_is_table, "one table of keys: write [base] once, and keys below it"),
    "settings": (_are_tables, "tables: write [[settings]] for each, and a name below it"),
    "variants": (_are_tables, "tables: write [[variants]] for each, and a name below it"),
    "smoke": (_is_table, "one table of keys: write [smoke] once, and keys below it"),
}


def read_sweep_file(file: Path) -> dict[str, Any]:
    """Read a sweep file, with what it takes `from` another; keys and kinds are checked.

    Raises:
        UserError: with the file, the key, the value and what is wanted.
    """
    table = _read_checked(file)
    if "from" not in table:
        return table
    parent = _read_checked(file.parent / table["from"])
    if "from" in parent:
        raise UserError(f"{file}: {table['from']} says `from` too: name the file it points to.")
    return {**parent, **table}


def check_names(place: str, key: str, value: Any) -> None:
    """Raise UserError where a key of a table does not hold a list of names."""
    if not _are_words(value):
        raise UserError(_wrong(place, key, value, f'a list of names, such as {key} = ["a"]'))


def _read_checked(file: Path) -> dict[str, Any]:
    table = read_table(file)
    for key, value in table.items():
        if key not in KINDS:
            raise UserError(f"{file}: unknown key '{key}'.{nearest(key, KINDS)}")
        fits, wanted = KINDS[key]
        if not fits(value):
            raise UserError(_wrong(str(file), key, value, wanted))
    return table


def _wrong(place: str, key: str, value: Any, wanted: str) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= LONGEST_VALUE else f"{shown[:LONGEST_VALUE]}..."
    return f"{place}: {key} = {shown} must be {wanted}."
