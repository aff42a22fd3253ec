"""Which cells are played side by side, and which are wanted at all.

Packs depend on the plan alone, never on what is done already: a sweep that was stopped plays the
same cells together as one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

from fedglimpse.config.checks import pick_device
from fedglimpse.config.loading import parse_words
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError, nearest
from fedglimpse.runs.build import together_key
from fedglimpse.studies.sweep.plan import Cell

CPU_LANES = 4
GPU_LANES = {"cifar10": 16, "fashion": 24}  # enough clients at once to fill one large GPU
GPU_LANES_SMALL = 48  # models without convolutions


def make_packs(
    cells: Sequence[Cell], configs: Mapping[str, Config], lanes: int | None
) -> list[list[Cell]]:
    """Group cells that can share a world, at most `lanes` at a time, of about equal size.

    First seeds come first, so that a sweep that is cut short holds whole comparisons.

    Args:
        cells: in the order of the file.
        configs: of each cell, by id.
        lanes: most cells in a pack; None: what suits the device and the model.
    """
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(together_key(configs[cell.id]), []).append(cell)
    packs = []
    for group in groups.values():
        size = lanes or suitable_lanes(configs[group[0].id])
        ordered = sorted(group, key=lambda c: c.seed)  # stable: the file's order within a seed
        count = -(-len(ordered) // size)
        cuts = [len(ordered) * i // count for i in range(count + 1)]
        packs += [ordered[a:b] for a, b in pairwise(cuts)]
    return packs


def begun_first(packs: Sequence[list[Cell]], begun: Callable[[Cell], bool]) -> list[list[Cell]]:
    """Return packs with those in front that hold a cell which was begun."""
    return sorted(packs, key=lambda pack: not any(begun(cell) for cell in pack))


def suitable_lanes(config: Config) -> int:
    """Return how many runs go well side by side on the configured device."""
    if pick_device(config.engine.device).type == "cpu":
        return CPU_LANES
    if config.model.name:
        return min(GPU_LANES.values())
    return GPU_LANES.get(config.data.name, GPU_LANES_SMALL)


def wanted(words: Sequence[str]) -> Callable[[Cell, Config], bool]:
    """Return the filter of `--only key=value` words.

    Keys are setting and variant (`*` stands for anything), seed, or any key of the configuration.
    A key that comes several times may have any of its values; different keys must all fit.
    """
    asked: dict[str, list[Any]] = {}
    for word in words:
        key, value = _asked(word)
        asked.setdefault(key, []).append(value)

    def fits(cell: Cell, config: Config) -> bool:
        names = {"setting": cell.setting.lower(), "variant": cell.variant.lower()}
        values = {**config.flat(), "seed": cell.seed}
        for key, allowed in asked.items():
            if key in names:
                if not any(fnmatchcase(names[key], pattern) for pattern in allowed):
                    return False
            elif values[key] not in allowed:
                return False
        return True

    return fits


def _asked(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    known = ["setting", "variant", "seed", *Config().flat()]
    if not equals:
        raise UserError(f"--only {word} is not of the form key=value, such as --only seed=0.")
    if key not in known:
        raise UserError(f"--only {word}: there is no key '{key}'.{nearest(key, known)}")
    if key in ("setting", "variant"):
        return key, text.lower()
    return key, parse_words([word])[key]
