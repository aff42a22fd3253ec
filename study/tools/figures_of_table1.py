"""Figures of the accuracy table that the prose of pages/reproduction.md speaks of.

    python tools/figures_of_table1.py

Points, mean over settings, 95 % interval and p-value, as in `reproduction/pooling.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from reproduction.evidence import Arm, Evidence, contrast, early, final, gain, over_strongest
from reproduction.pooling import Pooled, Values
from reproduction.rules_efficiency import average_saving
from reproduction.shelf import TUNED_ON, Shelf

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
    return f"{100 * found.mean:+.3f} [{low:+.3f}, {high:+.3f}], p = {found.p:.4f}"


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
        for variant, measure in (("glimpse", gain), (CONTROL, gain), ("glimpse", over_control)):
            pairs = [
                ((f"{p}, {SPLITS[1]}", variant), (f"{p}, {SPLITS[0]}", variant)) for p in places
            ]
            over = "the control" if measure is over_control else "the strongest"
            found = contrast(table, pairs, measure)
            print(f"{variant} over {over}, label skew minus Dirichlet, {data}:", text(found))
        for split in SPLITS:
            arms = [((f"{p}, {split}", "glimpse"), (f"{p}, {split}", CONTROL)) for p in places]
            print(f"glimpse minus {CONTROL}, {split}, {data}:", text(contrast(table, arms)))


def over_control(table: Evidence, arm: Arm) -> Values:
    """Accuracy minus that of the control, a `Measure`."""
    theirs = final(table, (arm[0], CONTROL))
    return {s: value - theirs[s] for s, value in final(table, arm).items() if s in theirs}


def against_published(table: Evidence, shelf: Shelf) -> None:
    """Print what is above the published size of a gain, or of a saving in percent."""
    said = {
        claim["id"]: claim.get("value", 0) / 100
        for file in ("paper_table1", "paper_fig5_efficiency")
        for claim in shelf.paper(file)["claims"]
    }
    seven = [f"{p}, {s}" for p in PLACES for s in SPLITS if f"{p}, {s}" != NOT_FIRST]
    above = over_strongest(table, seven, said["margin-where-first"])
    print("over the strongest, of the seven, minus the published gain:", text(above))
    for partition in ("dirichlet", "label_skew"):
        settings = table.where(partition=partition)
        for measure, word, others in (
            ("uplink_bytes", "uplink", table.baselines),
            ("server_flops", "server-flops", ["fedawac", "ha-edgeflow"]),
        ):
            published = said[f"saves-{word}-under-{partition.replace('_', '-')}"]
            saved = average_saving(table, settings, measure, others, published)
            beyond = None if saved is None else saved.beyond
            print(f"{measure} saved, {partition}, minus the published share:", text(beyond))


def beside_chance(table: Evidence) -> None:
    """Print each method minus the control, and early on without the seeds that chose the recipe."""
    for variant in (v for v in table.study.variants if v != CONTROL):
        pairs: list[tuple[Arm, Arm]] = [((s, variant), (s, CONTROL)) for s in table.study.settings]
        print(f"{variant} minus {CONTROL}:", text(contrast(table, pairs)))
    fresh = [cell for cell in table.study.cells if cell.seed not in TUNED_ON["table1"]]
    rest = replace(table, study=replace(table.study, cells=fresh))
    settings = [s for s in table.study.settings if not s.startswith("CIFAR-10")]
    for variant in ("oracle-balance", "dpp", "herd"):
        pairs = [((s, variant), (s, "fedavg")) for s in settings]
        found = contrast(rest, pairs, early)
        print(f"{variant} minus fedavg early on, fresh seeds of Fashion and HAPT:", text(found))


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
    against_published(evidence, shelf)
    beside_chance(evidence)
    beside_the_control(evidence)
    on_the_fresh_seed(evidence)
    costs(evidence)
