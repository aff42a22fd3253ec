"""Reading a sweep file: its keys and the kind of value that each of them takes.

A sweep file: settings x variants x seeds, and what the sweep is meant to find out.

    title = "..."             claim = "what is being tested"
    control = "fedavg-window" the variant that others are compared with
    paper = "paper_x.toml"    published figures, a file beside this one
    methods = ["fedavg"]      variants that are methods as they are
    [base]                    keys of every cell, such as seeds and rounds
    [[settings]]              name, keys; `target` (accuracy), `variants` (names; default: all)
    [[variants]]              name, method, keys
    [smoke]                   keys that turn every cell into a run of seconds

`from = "other.toml"` takes all this from another file; `pick_settings` and `pick_variants` name
what is wanted of it. Keys of a cell, in rising order: base, setting, variant, smoke.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedglimpse.config.checks import check
from fedglimpse.config.loading import read_table, resolve, resolve_stored
from fedglimpse.config.schema import Config, flatten
from fedglimpse.errors import UserError, nearest
from fedglimpse.methods import registry

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


LONGEST_NAME = 200  # letters of a cell's folder; file systems take 255


@dataclass(frozen=True)
class Cell:
    """One run of one seed."""

    id: str  # also the name of its folder
    setting: str
    variant: str
    seed: int
    overrides: Mapping[str, Any]  # dotted keys; with presets and defaults they are the whole run

    def config(self, extra: Mapping[str, Any]) -> Config:
        """Return its configuration; `extra` holds keys that results do not depend on."""
        return resolve({**self.overrides, **extra})

    def described(self) -> dict[str, Any]:
        """Return every dotted key, for reading results: settings that were retired too."""
        return resolve_stored(self.overrides).flat()


@dataclass(frozen=True)
class Plan:
    """Everything a sweep file says."""

    title: str
    claim: str
    control: str | None
    targets: Mapping[str, float]  # setting -> accuracy
    paper: Mapping[str, Any] | None
    cells: Sequence[Cell]


def read_plan(file: Path, smoke: bool = False, to_run: bool = True) -> Plan:
    """Read a sweep file and check every cell of it; nothing is written.

    Args:
        file: the sweep file.
        smoke: end with what its [smoke] table says.
        to_run: refuse settings that this version no longer runs.

    Raises:
        UserError: with the file, the place and the fix.
    """
    table = read_sweep_file(file)
    settings = _named(file, table, "settings")
    variants = {m: {"method": m} for m in table.get("methods", [])}
    more = _named(file, table, "variants")
    if twice := next((name for name in more if name in variants), None):
        raise UserError(f"{file}: {twice!r} is among methods and in [[variants]]: rename one.")
    variants |= more
    settings = _picked(file, settings, table.get("pick_settings"), "setting")
    variants = _picked(file, variants, table.get("pick_variants"), "variant")
    if not settings or not variants:
        raise UserError(f"{file} has no cells: give at least one setting and one variant.")
    if smoke and "smoke" not in table:
        raise UserError(f"{file} has no [smoke] table: add one, or leave --smoke out.")
    control = table.get("control")
    if control is not None and control not in variants:
        raise UserError(
            f"{file}: control = {control!r} is not a variant.{nearest(str(control), variants)}"
        )
    last = flatten(table["smoke"]) if smoke else {}
    cells = _grid(file, flatten(table.get("base", {})), settings, variants, last)
    for cell in {(c.setting, c.variant): c for c in cells}.values():
        _check_cell(file, cell, to_run)
    return Plan(
        title=str(table.get("title", file.stem)) + (" (smoke)" if smoke else ""),
        claim=str(table.get("claim", "")),
        control=control,
        targets=_targets(file, settings),
        paper=_paper(file, table.get("paper")),
        cells=cells,
    )


def configs_of(cells: Sequence[Cell], extra: Mapping[str, Any]) -> dict[str, Config]:
    """Return the configurations of cells by id; seeds of a variant share the work."""
    made: dict[tuple[str, str], Config] = {}
    for cell in cells:
        if (cell.setting, cell.variant) not in made:
            made[cell.setting, cell.variant] = cell.config(extra)
    return {c.id: replace(made[c.setting, c.variant], seeds=(c.seed,)) for c in cells}


def _grid(
    file: Path,
    base: Mapping[str, Any],
    settings: Mapping[str, Mapping[str, Any]],
    variants: Mapping[str, Mapping[str, Any]],
    last: Mapping[str, Any],
) -> list[Cell]:
    cells: dict[str, Cell] = {}
    for setting, keys in settings.items():
        wanted = _picked(file, variants, _own_variants(file, setting, keys), "variant")
        own = {k: v for k, v in keys.items() if k not in ("target", "variants")}
        for variant, more in wanted.items():
            values = {**base, **own, **more, **last}
            for seed in _seeds(file, values):
                name = _folder_name(file, setting, variant, seed)
                if name in cells:
                    raise UserError(
                        f"{file}: '{setting}, {variant}' and '{cells[name].setting}, "
                        f"{cells[name].variant}' would share the folder {name}: rename one."
                    )
                cells[name] = Cell(name, setting, variant, seed, {**values, "seeds": [seed]})
    return list(cells.values())


def _own_variants(file: Path, setting: str, keys: Mapping[str, Any]) -> Sequence[str] | None:
    """Return the variants that a setting asks for; None: all."""
    wanted = keys.get("variants")
    if wanted is not None:
        check_names(f"{file}, setting '{setting}'", "variants", wanted)
    if wanted == []:
        raise UserError(
            f"{file}, setting '{setting}': variants = [] leaves it without a cell: name at least "
            "one variant, or leave the key out for all."
        )
    return wanted


def _folder_name(file: Path, setting: str, variant: str, seed: int) -> str:
    name = f"{slug(setting)}--{slug(variant)}--s{seed}"
    if len(name) > LONGEST_NAME:
        raise UserError(
            f"{file}: setting '{_shown(setting)}' and variant '{_shown(variant)}' make a folder "
            f"name of {len(name)} letters: shorten a name, {LONGEST_NAME} is the most."
        )
    return name


def _shown(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:37]}..."


def _check_cell(file: Path, cell: Cell, to_run: bool) -> None:
    try:
        config = cell.config({}) if to_run else resolve_stored(cell.overrides).config
        check(config)
        registry.find(config.method)
    except UserError as error:
        raise UserError(f"{file}, setting '{cell.setting}', '{cell.variant}': {error}") from None


def _seeds(file: Path, values: Mapping[str, Any]) -> list[int]:
    seeds = values.get("seeds", [0])
    if not isinstance(seeds, list) or not all(type(s) is int for s in seeds):
        raise UserError(f"{file}: seeds={seeds!r} must be a list of whole numbers, such as [0, 1].")
    if len(set(seeds)) < len(seeds) or not seeds:
        raise UserError(f"{file}: seeds={seeds} must name at least one seed, and each one once.")
    return seeds


def _named(file: Path, table: Mapping[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Return the tables of `[[kind]]` as name -> dotted keys."""
    found: dict[str, dict[str, Any]] = {}
    for entry in table.get(kind, []):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise UserError(f'{file}: every [[{kind}]] table needs a name, such as name = "a".')
        if entry["name"] in found:
            raise UserError(f"{file}: [[{kind}]] name = {entry['name']!r} comes twice: rename one.")
        found[entry["name"]] = flatten({k: v for k, v in entry.items() if k != "name"})
    return found


def _picked(
    file: Path, named: Mapping[str, Any], wanted: Sequence[str] | None, kind: str
) -> dict[str, Any]:
    if wanted is None:
        return dict(named)
    for name in wanted:
        if name not in named:
            raise UserError(f"{file}: there is no {kind} {name!r}.{nearest(str(name), named)}")
    return {name: named[name] for name in wanted}


def _targets(file: Path, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    targets = {name: keys["target"] for name, keys in settings.items() if "target" in keys}
    for name, target in targets.items():
        if not isinstance(target, int | float) or not 0 < target <= 1:
            raise UserError(
                f"{file}: target = {target!r} of setting '{name}' must be an accuracy in (0, 1]."
            )
    return targets


def _paper(file: Path, name: str | None) -> dict[str, Any] | None:
    return None if name is None else read_table(file.parent / name)


def slug(name: str) -> str:
    """Return `name` in letters that suit any file system."""
    return re.sub(r"[^a-z0-9.=]+", "-", name.lower()).strip("-.")
