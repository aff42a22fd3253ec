"""Figures of the accuracy table that the prose of pages/reproduction.md quotes.

    python study/tools/figures_of_table1.py

Points, mean over settings, 95 % interval and p-value, as in `reproduction/pooling.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from reproduction.evidence import (
    OURS,
    Arm,
    Evidence,
    contrast,
    early,
    final,
    gain,
    in_every_setting,
    minus,
    over_strongest,
)
from reproduction.pooling import Pooled, Values
from reproduction.rules_efficiency import SERVER_BASELINES, average_saving
from reproduction.shelf import TUNED_ON, Shelf

CONTROL = "fedavg-window"
FRESH_SEED = 2  # the seed of CIFAR-10 that did not choose the recipe
NOT_FIRST = "Fashion, RA, Dirichlet"  # where the paper's own table has another method first
SITUATIONS = ("CIFAR-10, MS", "CIFAR-10, RA", "Fashion, MS", "Fashion, RA")
DIRICHLET = "Dirichlet"
LABEL_SKEW = "label skew"
COSTS = ("uplink_bytes", "downlink_bytes", "client_flops", "server_flops")
DATA = {"both": "", "CIFAR-10": "CIFAR-10", "Fashion": "Fashion"}  # label -> start of settings


def text(difference: Pooled | None) -> str:
    """Return a difference in points."""
    if difference is None:
        return "not run"
    if difference.low is None or difference.high is None:
        return f"{100 * difference.mean:+.1f}"
    low = 100 * difference.low
    high = 100 * difference.high
    return f"{100 * difference.mean:+.3f} [{low:+.3f}, {high:+.3f}], p = {difference.p:.4f}"


def image_settings() -> list[str]:
    """Return the eight settings of the image data."""
    settings: list[str] = []
    for situation in SITUATIONS:
        settings += [f"{situation}, {DIRICHLET}", f"{situation}, {LABEL_SKEW}"]
    return settings


def first_settings(prefix: str = "") -> list[str]:
    """Return the settings in which the paper's table has glimpse first."""
    return [s for s in image_settings() if s != NOT_FIRST and s.startswith(prefix)]


def gains(evidence: Evidence) -> None:
    """Print how far `glimpse` is above the strongest of the paper's baselines."""
    for setting in [*image_settings(), *evidence.where(data="hapt")]:
        difference = text(over_strongest(evidence, [setting]))
        print(f"over {evidence.strongest(setting)} in {setting}:", difference)
    for label, prefix in DATA.items():
        seven = first_settings(prefix)
        skewed = [setting for setting in seven if setting.endswith(LABEL_SKEW)]
        print(f"over the strongest, {label}, of the seven:", text(over_strongest(evidence, seven)))
        print(f"over the strongest, {label}, label skew:", text(over_strongest(evidence, skewed)))


def compared_with_the_control(evidence: Evidence) -> None:
    """Print what of the gain under label skew the control has too, and what it has not."""
    for label, prefix in DATA.items():
        situations = [situation for situation in SITUATIONS if situation.startswith(prefix)]
        for variant, measure, base in (
            (OURS, gain, "the strongest"),
            (CONTROL, gain, "the strongest"),
            (OURS, over_control, "the control"),
        ):
            pairs: list[tuple[Arm, Arm]] = []
            for situation in situations:
                skewed = (f"{situation}, {LABEL_SKEW}", variant)
                pairs.append((skewed, (f"{situation}, {DIRICHLET}", variant)))
            difference = text(contrast(evidence, pairs, measure))
            print(f"{variant} over {base}, label skew minus Dirichlet, {label}:", difference)
        for partition in (DIRICHLET, LABEL_SKEW):
            settings = [f"{situation}, {partition}" for situation in situations]
            difference = text(in_every_setting(evidence, OURS, CONTROL, settings=settings))
            print(f"{OURS} minus {CONTROL}, {partition}, {label}:", difference)


def over_control(evidence: Evidence, arm: Arm) -> Values:
    """Accuracy minus that of the control, a `Measure`."""
    setting, _ = arm
    return minus(final(evidence, arm), final(evidence, (setting, CONTROL)))


def against_published(evidence: Evidence, shelf: Shelf) -> None:
    """Print what is above the published size of a gain, or of a saving in percent."""
    published: dict[str, float] = {}
    for file in ("paper_table1", "paper_fig5_efficiency"):
        for claim in shelf.paper(file)["claims"]:
            published[claim["id"]] = claim.get("value", 0) / 100
    above = over_strongest(evidence, first_settings(), published["margin-where-first"])
    print("over the strongest, of the seven, minus the published gain:", text(above))
    for partition in ("dirichlet", "label_skew"):
        for measure, word, baselines in (
            ("uplink_bytes", "uplink", evidence.baselines),
            ("server_flops", "server-flops", SERVER_BASELINES),
        ):
            share = published[f"saves-{word}-under-{partition.replace('_', '-')}"]
            settings = evidence.where(partition=partition)
            saved = average_saving(evidence, settings, measure, baselines, share)
            beyond = None if saved is None else saved.beyond
            print(f"{measure} saved, {partition}, minus the published share:", text(beyond))


def compared_with_chance(evidence: Evidence) -> None:
    """Print each method minus the control, and early on without the seeds that chose the recipe."""
    for variant in evidence.study.variants:
        if variant != CONTROL:
            difference = text(in_every_setting(evidence, variant, CONTROL))
            print(f"{variant} minus {CONTROL}:", difference)
    fresh_cells = [cell for cell in evidence.study.cells if cell.seed not in TUNED_ON["table1"]]
    fresh = replace(evidence, study=replace(evidence.study, cells=fresh_cells))
    settings = [s for s in evidence.study.settings if not s.startswith("CIFAR-10")]
    for variant in ("oracle-balance", "dpp", "herd"):
        difference = text(in_every_setting(fresh, variant, "fedavg", early, settings=settings))
        print(f"{variant} minus fedavg early on, fresh seeds of Fashion and HAPT:", difference)


def on_the_fresh_seed(evidence: Evidence) -> None:
    """Print every method minus the control on CIFAR-10's fresh seed, setting by setting."""
    settings = [s for s in evidence.study.settings if s.startswith("CIFAR-10")]
    for variant in evidence.study.variants:
        if variant == CONTROL:
            continue
        gaps: list[float] = []
        for setting in settings:
            accuracy = final(evidence, (setting, variant))[FRESH_SEED]
            gaps.append(100 * (accuracy - final(evidence, (setting, CONTROL))[FRESH_SEED]))
        by_setting = ", ".join(f"{gap:+.1f}" for gap in gaps)
        print(f"{variant} on seed {FRESH_SEED} of CIFAR-10: {fmean(gaps):+.1f} ({by_setting})")


def costs(evidence: Evidence) -> None:
    """Print what is saved until the fixed targets; twice the cost is -100 %."""
    groups: list[Sequence[str]] = [evidence.baselines]
    for method in (*evidence.baselines, CONTROL):
        groups.append([method])
    for label, prefix in DATA.items():
        for partition in ("dirichlet", "label_skew"):
            settings = [s for s in evidence.where(partition=partition) if s.startswith(prefix)]
            for measure in COSTS:
                for methods in groups:
                    saved = average_saving(evidence, settings, measure, methods)
                    share = "not run" if saved is None else saved.text
                    print(f"{measure}, {partition}, {label}, against {', '.join(methods)}: {share}")


def main() -> None:
    """Print everything."""
    shelf = Shelf(Path(__file__).parents[1])
    evidence = Evidence(shelf.study("table1").study, shelf.paper("paper_table1"))
    gains(evidence)
    against_published(evidence, shelf)
    compared_with_chance(evidence)
    compared_with_the_control(evidence)
    on_the_fresh_seed(evidence)
    costs(evidence)


if __name__ == "__main__":
    main()
