"""Figures of the accuracy table that the prose of docs/reproduction.md speaks of.

    python tools/figures_of_table1.py

Points, mean over settings, 95 % interval and p-value, as in `reproduction/pooling.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from reproduction.evidence import Evidence, contrast, final, gain, over_strongest
from reproduction.pooling import Pooled, pool
from reproduction.rules_efficiency import average_saving
from reproduction.shelf import Shelf

CONTROL, FRESH = "fedavg-window", 2  # the seed of CIFAR-10 that did not choose the recipe
NOT_FIRST = "Fashion, RA, Dirichlet"  # where the paper's own table has another first
PLACES = ("CIFAR-10, MS", "CIFAR-10, RA", "Fashion, MS", "Fashion, RA")
SPLITS = ("Dirichlet", "label skew")
COSTS = ("uplink_bytes", "downlink_bytes", "client_flops", "server_flops")
SOME = {"both": "", "CIFAR-10": "CIFAR-10", "Fashion": "Fashion"}


def text(found: Pooled | None) -> str:
    """Return a difference in points."""
    if found is None:
        return "not run"
    if found.low is None or found.high is None:
        return f"{100 * found.mean:+.1f}"
    low, high = 100 * found.low, 100 * found.high
    return f"{100 * found.mean:+.2f} [{low:+.2f}, {high:+.2f}], p = {found.p:.4f}"


def gains(table: Evidence) -> None:
    """Print how far `glimpse` is above the strongest of the paper's baselines."""
    settings = [f"{place}, {split}" for place in PLACES for split in SPLITS]
    for setting in [*settings, *table.where(data="hapt")]:
        print(
            f"over {table.strongest(setting)} in {setting}:", text(over_strongest(table, [setting]))
        )
    for data, begin in SOME.items():
        seven = [s for s in settings if s != NOT_FIRST and s.startswith(begin)]
        print(f"over the strongest, {data}, of the seven:", text(over_strongest(table, seven)))
        skewed = [s for s in seven if s.endswith("label skew")]
        print(f"over the strongest, {data}, label skew:", text(over_strongest(table, skewed)))


def beside_the_control(table: Evidence) -> None:
    """Print what of the gain under label skew the control has too, and what it has not."""
    for data, begin in SOME.items():
        places = [place for place in PLACES if place.startswith(begin)]
        for variant in ("glimpse", CONTROL):
            pairs = [
                ((f"{p}, {SPLITS[1]}", variant), (f"{p}, {SPLITS[0]}", variant)) for p in places
            ]
            found = contrast(table, pairs, gain)
            print(f"gain of {variant}, label skew minus Dirichlet, {data}:", text(found))
        print(f"glimpse minus {CONTROL}, the same, {data}:", text(_left(table, places)))
        for split in SPLITS:
            arms = [((f"{p}, {split}", "glimpse"), (f"{p}, {split}", CONTROL)) for p in places]
            print(f"glimpse minus {CONTROL}, {split}, {data}:", text(contrast(table, arms)))


def _left(table: Evidence, places: Sequence[str]) -> Pooled | None:
    """Return `glimpse` minus the control under label skew, minus the same with Dirichlet splits."""
    groups: dict[str, list[dict[int, float]]] = {}
    for place in places:
        dirichlet, skewed = (
            [final(table, (f"{place}, {split}", v)) for v in ("glimpse", CONTROL)]
            for split in SPLITS
        )
        seeds = skewed[0].keys() & dirichlet[0].keys()
        left = {
            s: (skewed[0][s] - skewed[1][s]) - (dirichlet[0][s] - dirichlet[1][s]) for s in seeds
        }
        groups.setdefault(table.data(f"{place}, {SPLITS[0]}"), []).append(left)
    return pool(groups)


def on_the_fresh_seed(table: Evidence) -> None:
    """Print every method minus the control on CIFAR-10's fresh seed, setting by setting."""
    settings = [s for s in table.study.settings if s.startswith("CIFAR-10")]
    for variant in (v for v in table.study.variants if v != CONTROL):
        apart = [
            100 * (final(table, (s, variant))[FRESH] - final(table, (s, CONTROL))[FRESH])
            for s in settings
        ]
        each = ", ".join(f"{points:+.1f}" for points in apart)
        print(f"{variant} on seed {FRESH} of CIFAR-10: {fmean(apart):+.1f} ({each})")


def costs(table: Evidence) -> None:
    """Print what is saved until the fixed targets; twice as dear is -100 %."""
    for data, begin in SOME.items():
        for partition in ("dirichlet", "label_skew"):
            settings = [s for s in table.where(partition=partition) if s.startswith(begin)]
            for measure in COSTS:
                for other in (table.baselines, *([b] for b in [*table.baselines, CONTROL])):
                    saved = average_saving(table, settings, measure, list(other))
                    told = "not run" if saved is None else saved.text
                    print(f"{measure}, {partition}, {data}, against {', '.join(other)}: {told}")


if __name__ == "__main__":
    shelf = Shelf(Path(__file__).parents[1])
    evidence = Evidence(shelf.study("table1").study, shelf.paper("paper_table1"))
    gains(evidence)
    beside_the_control(evidence)
    on_the_fresh_seed(evidence)
    costs(evidence)
