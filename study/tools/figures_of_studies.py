"""Figures of the other studies that the prose of pages/reproduction.md quotes.

    python study/tools/figures_of_studies.py

As `figures_of_table1.py`, which has those of the accuracy table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fedglimpse.studies.report.analysis import analyse
from figures_of_table1 import CONTROL, text
from reproduction.evidence import (
    OURS,
    Arm,
    Evidence,
    Measure,
    contrast,
    early,
    final,
    in_every_setting,
    minus,
    proxy,
)
from reproduction.pooling import Values
from reproduction.shelf import CHOSE_THE_RECIPE, Shelf

PARTITIONS = ("dirichlet", "label_skew")
UNTAUGHT = "glimpse, untaught"
TAUGHT = "glimpse, taught"
WITH_OURS = (  # studies of `glimpse` with preset `tuned-1` that have the control too
    "table1", "fig7_selection", "agent_study", "history_study", "lean_study", "proof_study",
    "taught_study",
)  # fmt: skip


def difference(
    evidence: Evidence,
    variant: str,
    other: str,
    settings: Sequence[str] | None = None,
    measure: Measure = final,
) -> str:
    """Return the difference of two variants, pooled over settings; by default over all."""
    return text(in_every_setting(evidence, variant, other, measure, settings=settings))


def seed_by_seed(evidence: Evidence, variant: str, other: str, setting: str) -> str:
    """Return the difference of two variants in points, a number for each seed."""
    values = final(evidence, (setting, variant))
    differences = minus(values, final(evidence, (setting, other)))
    return ", ".join(f"{100 * differences[seed]:+.1f}" for seed in values if seed in differences)


def label(where: dict[str, str]) -> str:
    """Return the words that name a choice of settings."""
    return ", ".join(where.values()) or "all settings"


def by_partition(shelf: Shelf) -> None:
    """Print `glimpse` minus the control under each partition, study by study."""
    for name in WITH_OURS:
        evidence = Evidence(shelf.study(name).study, {})
        data_names = dict.fromkeys(map(evidence.data, evidence.study.settings))
        for data in data_names:
            for partition in PARTITIONS:
                settings = evidence.where(data=data, partition=partition)
                if settings:
                    gap = difference(evidence, OURS, CONTROL, settings)
                    print(f"{OURS} minus {CONTROL}, {name}, {data}, {partition}: {gap}")


def with_adam(evidence: Evidence) -> None:
    """Print `glimpse` and the control minus each baseline where clients train with Adam."""
    choices: list[dict[str, str]] = [{}, {"data": "fashion"}, {"data": "cifar10"}]
    for partition in PARTITIONS:
        choices.append({"data": "cifar10", "partition": partition})
    for where in choices:
        settings = evidence.where(**where)
        for baseline in evidence.baselines:
            for variant in (OURS, CONTROL):
                gap = difference(evidence, variant, baseline, settings)
                print(f"Adam, {variant} minus {baseline}, {label(where)}: {gap}")
        gap = difference(evidence, OURS, CONTROL, settings)
        print(f"Adam, {OURS} minus {CONTROL}, {label(where)}: {gap}")
    for setting in evidence.study.settings:
        gaps = seed_by_seed(evidence, OURS, CONTROL, setting)
        print(f"Adam, {OURS} minus {CONTROL} seed by seed, {setting}: {gaps}")


def near_the_paper(shelf: Shelf) -> None:
    """Print how near figures are to the published ones, with both recipes, in the same settings."""
    settings = shelf.study("recipe_adam").study.settings
    for name in ("table1", "recipe_adam"):
        distances: dict[str, list[float]] = {"baselines": [], OURS: []}
        near = {"baselines": 0, OURS: 0}
        for row in analyse(shelf.study(name).study).rows:
            if row.setting not in settings or row.paper is None or row.published is None:
                continue
            group = OURS if row.variant == OURS else "baselines"
            distance = abs(row.paper.difference.mean)
            distances[group].append(distance)
            near[group] += distance <= row.published.figure.std
        for group, values in distances.items():
            print(
                f"{name}, {group}: {near[group]} of {len(values)} within one published standard "
                f"deviation, mean distance {100 * fmean(values):.1f} points"
            )


def as_printed_and_released(evidence: Evidence) -> None:
    """Print `glimpse` minus the control with the paper's and with the released settings."""
    for preset in ("paper", "released"):
        variant = f"{OURS}, {preset}"
        control = f"{CONTROL}, {preset}"
        print(f"{variant} minus {control}:", difference(evidence, variant, control))
        for setting in evidence.study.settings:
            gaps = seed_by_seed(evidence, variant, control, setting)
            print(f"{variant} minus {control} seed by seed, {setting}: {gaps}")
            accuracies = final(evidence, (setting, variant)).values()
            percents = ", ".join(f"{100 * accuracy:.1f} %" for accuracy in accuracies)
            print(f"{variant} seed by seed, {setting}: {percents}")


def the_agent_that_tuned_took(evidence: Evidence) -> None:
    """Print what decides the rule of `taught.toml`, the first line, and the other comparisons."""
    choices: list[dict[str, str]] = [{}]
    for partition in PARTITIONS:
        choices.append({"partition": partition})
    for name, measure in (("proxy score", proxy), ("accuracy", final), ("early", early)):
        for where in choices:
            settings = evidence.where(**where)
            for agent in (UNTAUGHT, TAUGHT):
                for other in (OURS, CONTROL, "power-of-choice"):
                    gap = difference(evidence, agent, other, settings, measure)
                    print(f"{name}, {agent} minus {other}, {label(where)}: {gap}")
        gap = difference(evidence, TAUGHT, UNTAUGHT, measure=measure)
        print(f"{name}, taught minus untaught:", gap)


def how_far_the_rule_holds(evidence: Evidence) -> None:
    """Print all proxy scores minus that of `glimpse`, and the rule on a part of the runs."""
    for variant in evidence.study.variants:
        if variant != OURS:
            gap = difference(evidence, variant, OURS, measure=proxy)
            print(f"proxy score, {variant} minus {OURS}: {gap}")
    smaller = [setting for setting in evidence.study.settings if "20 visible" not in setting]
    gap = difference(evidence, UNTAUGHT, OURS, smaller, proxy)
    print("the rule without 20 visible clients:", gap)
    for name, measure in (("rule", proxy), ("accuracy", final)):
        gap = difference(evidence, UNTAUGHT, OURS, measure=on_fresh_seeds(measure))
        print(f"the {name} without the seeds that chose the recipe: {gap}")


def on_fresh_seeds(measure: Measure) -> Measure:
    """Return a measure without the seeds that chose the recipe."""

    def measure_fresh(evidence: Evidence, arm: Arm) -> Values:
        values = measure(evidence, arm)
        return {seed: value for seed, value in values.items() if seed not in CHOSE_THE_RECIPE}

    return measure_fresh


def contexts_and_clusters(shelf: Shelf) -> None:
    """Print H changed with horizon and window, and larger clusters for agent and control."""
    history = Evidence(shelf.study("fig6_history").study, {})
    fashion = history.where(data="fashion")
    for variant in history.study.variants:
        if "also" in variant:
            for other in ("H=1", "H=5", CONTROL):
                gap = difference(history, variant, other, fashion)
                print(f"{variant} minus {other}, Fashion:", gap)
    selection = Evidence(shelf.study("fig7_selection").study, {})
    for variant in (OURS, CONTROL):
        pairs: list[tuple[Arm, Arm]] = []
        for large in selection.study.settings:
            for small in selection.study.settings:
                if _same_share(selection, large, small):
                    pairs.append(((large, variant), (small, variant)))
        gap = text(contrast(selection, pairs))
        print(f"20 visible minus 10, the same share, {variant}:", gap)


def _same_share(evidence: Evidence, large: str, small: str) -> bool:
    """Return whether these are 20 and 10 visible clients, with equal partition and chosen share."""
    a = evidence.config(large)
    b = evidence.config(small)
    return bool(
        a["visibility.kind"] == b["visibility.kind"] == "mobile"
        and a["visibility.cluster_size"] == 20
        and b["visibility.cluster_size"] == 10
        and a["data.partition"] == b["data.partition"]
        and a["selection.k"] == 2 * b["selection.k"]
    )


def main() -> None:
    """Print everything."""
    shelf = Shelf(Path(__file__).parents[1])
    by_partition(shelf)
    with_adam(Evidence(shelf.study("recipe_adam").study, shelf.paper("paper_table1")))
    near_the_paper(shelf)
    as_printed_and_released(Evidence(shelf.study("presets").study, {}))
    taught = Evidence(shelf.study("taught").study, {})
    the_agent_that_tuned_took(taught)
    how_far_the_rule_holds(taught)
    contexts_and_clusters(shelf)


if __name__ == "__main__":
    main()
