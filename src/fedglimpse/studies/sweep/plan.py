"""A sweep file, and the grid of cells it describes: settings x variants x seeds.

    title = "..."             claim = "what is being tested"
    control = "fedavg-window" the variant that others are compared with
    paper = "paper_x.toml"    published figures, a file beside this one
    methods = ["fedavg"]      variants that are methods without further keys
    [base]                    keys of every cell, such as seeds and rounds
    [[settings]]              name, keys; `target` (accuracy), `variants` (names; default: all)
    [[variants]]              name, method, keys
    [smoke]                   keys that turn every cell into a run of seconds

`from = "other.toml"` takes all this from another file; `pick_settings` and `pick_variants` name
the settings and variants to take. Keys of a cell, in rising priority: base, setting, variant,
smoke.
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

MAX_VALUE_LETTERS = 60  # of a value that an error shows
MAX_SHOWN_NAME = 40  # letters of a setting's or variant's name that an error shows
MAX_FOLDER_NAME = 200  # letters; file systems take 255

Table = Mapping[str, Any]  # dotted keys -> values
Tables = Mapping[str, Table]  # name of a setting or variant -> its keys


@dataclass(frozen=True)
class Cell:
    """One seed of one variant in one setting: one run."""

    id: str  # also the name of its folder
    setting: str
    variant: str
    seed: int
    overrides: Table  # dotted keys; with presets and defaults they are the whole run

    def config(self, extra: Table) -> Config:
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


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_name, value))


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_table, value))


def _is_anything(value: Any) -> bool:
    return True


KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # key -> check, what it must be
    "title": (_is_anything, ""),
    "claim": (_is_anything, ""),
    "control": (_is_name, 'the name of a variant, such as control = "fedavg"'),
    "paper": (_is_name, 'the name of a file beside this one, such as paper = "paper_x.toml"'),
    "from": (_is_name, 'the name of a file beside this one, such as from = "other.toml"'),
    "pick_settings": (_are_names, 'a list of names, such as pick_settings = ["a"]'),
    "pick_variants": (_are_names, 'a list of names, such as pick_variants = ["a"]'),
    "methods": (_are_names, 'a list of names, such as methods = ["fedavg"]'),
    "base": (_is_table, "one table of keys: write [base] once, and keys below it"),
    "settings": (_are_tables, "tables: write [[settings]] for each, and a name below it"),
    "variants": (_are_tables, "tables: write [[variants]] for each, and a name below it"),
    "smoke": (_is_table, "one table of keys: write [smoke] once, and keys below it"),
}


def read_plan(file: Path, smoke: bool = False, to_run: bool = True) -> Plan:
    """Read a sweep file and check every cell of it; nothing is written.

    Args:
        file: the sweep file.
        smoke: apply its [smoke] table.
        to_run: refuse settings that this version no longer runs.

    Raises:
        UserError: with the file, the value and the fix.
    """
    table = _read_tables(file)
    settings = _picked(file, _settings(file, table), table.get("pick_settings"), "setting")
    variants = _picked(file, _variants(file, table), table.get("pick_variants"), "variant")
    if not settings or not variants:
        raise UserError(f"{file} has no cells: give at least one setting and one variant.")
    if smoke and "smoke" not in table:
        raise UserError(f"{file} has no [smoke] table: add one, or leave --smoke out.")
    control = table.get("control")
    if control is not None and control not in variants:
        raise UserError(
            f"{file}: control = {control!r} is not a variant.{nearest(str(control), variants)}",
            key="control",
        )
    cells = _grid(
        file,
        base=flatten(table.get("base", {})),
        settings=settings,
        variants=variants,
        smoke_keys=flatten(table["smoke"]) if smoke else {},
    )
    checked: set[tuple[str, str]] = set()
    for cell in cells:
        if (cell.setting, cell.variant) not in checked:
            _check_cell(file, cell, to_run)
            checked.add((cell.setting, cell.variant))
    title = str(table.get("title", file.stem))
    paper = table.get("paper")
    return Plan(
        title=f"{title} (smoke)" if smoke else title,
        claim=str(table.get("claim", "")),
        control=control,
        targets=_targets(file, settings),
        paper=None if paper is None else read_table(file.parent / paper),
        cells=cells,
    )


def configs_of(cells: Sequence[Cell], extra: Table) -> dict[str, Config]:
    """Return the configurations of cells by id; seeds of a variant share the work."""
    resolved: dict[tuple[str, str], Config] = {}
    configs: dict[str, Config] = {}
    for cell in cells:
        pair = cell.setting, cell.variant
        if pair not in resolved:
            resolved[pair] = cell.config(extra)
        configs[cell.id] = replace(resolved[pair], seeds=(cell.seed,))
    return configs


def _read_tables(file: Path) -> dict[str, Any]:
    """Read a sweep file, with what it takes `from` another; keys and kinds are checked."""
    table = _read_checked(file)
    if "from" not in table:
        return table
    parent = _read_checked(file.parent / table["from"])
    if "from" in parent:
        raise UserError(
            f"{file}: {table['from']} says `from` too: name the file it points to.", key="from"
        )
    return {**parent, **table}


def _read_checked(file: Path) -> dict[str, Any]:
    table = read_table(file)
    for key, value in table.items():
        if key not in KINDS:
            raise UserError(f"{file}: unknown key '{key}'.{nearest(key, KINDS)}", key=key)
        is_right, expected = KINDS[key]
        if not is_right(value):
            raise _wrong_value(str(file), key, value, expected)
    return table


def _wrong_value(place_in_file: str, key: str, value: Any, expected: str) -> UserError:
    shown = _shortened(repr(value), MAX_VALUE_LETTERS)
    return UserError(f"{place_in_file}: {key} = {shown} must be {expected}.", key=key)


def _shortened(text: str, letters: int) -> str:
    if len(text) <= letters:
        return text
    return f"{text[:letters]}..."


def _settings(file: Path, table: Table) -> dict[str, Table]:
    return _by_name(file, table, "settings")


def _variants(file: Path, table: Table) -> dict[str, Table]:
    variants: dict[str, Table] = {}
    for method in table.get("methods", []):
        variants[method] = {"method": method}
    for name, keys in _by_name(file, table, "variants").items():
        if name in variants:
            raise UserError(f"{file}: {name!r} is among methods and in [[variants]]: rename one.")
        variants[name] = keys
    return variants


def _by_name(file: Path, table: Table, kind: str) -> dict[str, Table]:
    """Return the tables of `[[kind]]` as name -> dotted keys."""
    tables: dict[str, Table] = {}
    for entry in table.get(kind, []):
        name = entry.get("name")
        if not isinstance(name, str):
            raise UserError(f'{file}: every [[{kind}]] table needs a name, such as name = "a".')
        if name in tables:
            raise UserError(f"{file}: [[{kind}]] name = {name!r} comes twice: rename one.")
        keys = dict(entry)
        del keys["name"]
        tables[name] = flatten(keys)
    return tables


def _picked(
    file: Path,
    tables: Tables,
    picked_names: Sequence[str] | None,
    kind: str,
) -> dict[str, Table]:
    """Return the named settings or variants; without names all of them."""
    if picked_names is None:
        return dict(tables)
    picked: dict[str, Table] = {}
    for name in picked_names:
        if name not in tables:
            raise UserError(f"{file}: there is no {kind} {name!r}.{nearest(str(name), tables)}")
        picked[name] = tables[name]
    return picked


def _grid(
    file: Path,
    base: Table,
    settings: Tables,
    variants: Tables,
    smoke_keys: Table,
) -> list[Cell]:
    """Return a cell for each seed of each variant in each setting."""
    cells: dict[str, Cell] = {}
    for setting, setting_keys in settings.items():
        names = _variants_of_setting(file, setting, setting_keys)
        overrides = dict(setting_keys)
        overrides.pop("target", None)
        overrides.pop("variants", None)
        variants_here = _picked(file, variants, names, "variant")
        for variant, variant_keys in variants_here.items():
            values = {**base, **overrides, **variant_keys, **smoke_keys}
            for seed in _seeds(file, values):
                name = _folder_name(file, setting, variant, seed)
                if name in cells:
                    raise UserError(
                        f"{file}: '{setting}, {variant}' and '{cells[name].setting}, "
                        f"{cells[name].variant}' would share the folder {name}: rename one."
                    )
                cells[name] = Cell(
                    id=name,
                    setting=setting,
                    variant=variant,
                    seed=seed,
                    overrides={**values, "seeds": [seed]},
                )
    return list(cells.values())


def _variants_of_setting(file: Path, setting: str, keys: Table) -> Sequence[str] | None:
    """Return the variants that a setting asks for; None: all."""
    names: Sequence[str] | None = keys.get("variants")
    place_in_file = f"{file}, setting '{setting}'"
    if names is not None and not _are_names(names):
        expected = 'a list of names, such as variants = ["a"]'
        raise _wrong_value(place_in_file, "variants", names, expected)
    if names == []:
        raise UserError(
            f"{place_in_file}: variants = [] leaves it without a cell: name at least one variant, "
            "or leave the key out for all.",
            key="variants",
        )
    return names


def _folder_name(file: Path, setting: str, variant: str, seed: int) -> str:
    name = f"{slug(setting)}--{slug(variant)}--s{seed}"
    if len(name) > MAX_FOLDER_NAME:
        raise UserError(
            f"{file}: setting '{_shortened(setting, MAX_SHOWN_NAME)}' and variant "
            f"'{_shortened(variant, MAX_SHOWN_NAME)}' make a folder name of {len(name)} letters: "
            f"shorten a name, {MAX_FOLDER_NAME} is the most."
        )
    return name


def _check_cell(file: Path, cell: Cell, to_run: bool) -> None:
    try:
        config = cell.config({}) if to_run else resolve_stored(cell.overrides).config
        check(config)
        registry.check_name(config.method)
    except UserError as error:
        raise UserError(
            f"{file}, setting '{cell.setting}', '{cell.variant}': {error}", key=error.key
        ) from None


def _seeds(file: Path, values: Table) -> list[int]:
    seeds = values.get("seeds", [0])
    if not isinstance(seeds, list) or not all(type(seed) is int for seed in seeds):
        raise UserError(
            f"{file}: seeds={seeds!r} must be a list of whole numbers, such as [0, 1].",
            key="seeds",
        )
    if len(set(seeds)) < len(seeds) or not seeds:
        raise UserError(
            f"{file}: seeds={seeds} must name at least one seed, and each one once.", key="seeds"
        )
    return seeds


def _targets(file: Path, settings: Tables) -> dict[str, float]:
    targets: dict[str, float] = {}
    for name, keys in settings.items():
        target = keys.get("target")
        if target is None:
            continue
        if not isinstance(target, int | float) or not 0 < target <= 1:
            raise UserError(
                f"{file}: target = {target!r} of setting '{name}' must be an accuracy in (0, 1].",
                key="target",
            )
        targets[name] = target
    return targets


def slug(name: str) -> str:
    """Return `name` in letters that suit any file system."""
    return re.sub(r"[^a-z0-9.=]+", "-", name.lower()).strip("-.")
