"""Figures of the other studies that the prose of pages/reproduction.md speaks of.

    python tools/figures_of_studies.py

As `figures_of_table1.py`, which has those of the accuracy table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fedglimpse.studies.report.analysis import analyse
from figures_of_table1 import CONTROL, text
from reproduction.evidence import OURS, Arm, Evidence, Measure, contrast, early, final, proxy
from reproduction.pooling import Values
from reproduction.shelf import CHOSE_THE_RECIPE, Shelf

SPLITS = ("dirichlet", "label_skew")
WITH_OURS = (  # studies of `glimpse` as `tuned-1` has it beside the control
    "table1", "fig7_selection", "agent_study", "history_study", "lean_study", "proof_study",
    "taught_study",
)  # fmt: skip


def minus(
    of: Evidence, one: str, other: str, settings: Sequence[str], measure: Measure = final
) -> str:
    """Return the difference of two variants, pooled over settings."""
    return text(contrast(of, [((s, one), (s, other)) for s in settings], measure))


def seed_by_seed(of: Evidence, one: str, other: str, setting: str) -> str:
    """Return the difference of two variants in points, a number for each seed."""
    ours, theirs = final(of, (setting, one)), final(of, (setting, other))
    return ", ".join(f"{100 * (ours[s] - theirs[s]):+.1f}" for s in ours if s in theirs)


def by_partition(shelf: Shelf) -> None:
    """Print `glimpse` minus the control under each partition, study by study."""
    for name in WITH_OURS:
        of = Evidence(shelf.study(name).study, {})
        data = dict.fromkeys(of.data(s) for s in of.study.settings)
        for one in data:
            for split in SPLITS:
                if settings := of.where(data=one, partition=split):
                    told = minus(of, OURS, CONTROL, settings)
                    print(f"{OURS} minus {CONTROL}, {name}, {one}, {split}: {told}")


def with_adam(of: Evidence) -> None:
    """Print `glimpse` and the control beside the others where clients train with Adam."""
    wheres: list[dict[str, str]] = [{}, {"data": "fashion"}, {"data": "cifar10"}]
    wheres += [{"data": "cifar10", "partition": split} for split in SPLITS]
    for where in wheres:
        place = ", ".join(where.values()) or "all settings"
        for variant in of.baselines:
            for one in (OURS, CONTROL):
                told = minus(of, one, variant, of.where(**where))
                print(f"Adam, {one} minus {variant}, {place}: {told}")
        print(
            f"Adam, {OURS} minus {CONTROL}, {place}: {minus(of, OURS, CONTROL, of.where(**where))}"
        )
    for setting in of.study.settings:
        each = seed_by_seed(of, OURS, CONTROL, setting)
        print(f"Adam, {OURS} minus {CONTROL} seed by seed, {setting}: {each}")


def near_the_paper(shelf: Shelf) -> None:
    """Print how near figures are to the published ones, with both recipes, in the same settings."""
    settings = shelf.study("recipe_adam").study.settings
    for name in ("table1", "recipe_adam"):
        rows = [r for r in analyse(shelf.study(name).study).rows if r.setting in settings]
        gaps = {
            (r.setting, r.variant): (r.paper.difference.mean, r.published.figure.std)
            for r in rows
            if r.paper is not None and r.published is not None
        }
        for who in ("baselines", OURS):
            mine = [g for (_, variant), g in gaps.items() if (variant == OURS) == (who == OURS)]
            near = sum(abs(gap) <= std for gap, std in mine)
            distance = 100 * fmean(abs(gap) for gap, _ in mine)
            print(
                f"{name}, {who}: {near} of {len(mine)} within one published standard deviation, "
                f"mean distance {distance:.1f} points"
            )


def as_printed_and_released(of: Evidence) -> None:
    """Print `glimpse` minus the control with the paper's and with the released settings."""
    for preset in ("paper", "released"):
        ours, theirs = f"{OURS}, {preset}", f"{CONTROL}, {preset}"
        print(f"{ours} minus {theirs}:", minus(of, ours, theirs, of.study.settings))
        for setting in of.study.settings:
            each = seed_by_seed(of, ours, theirs, setting)
            print(f"{ours} minus {theirs} seed by seed, {setting}: {each}")
            each = ", ".join(
                f"{100 * value:.1f} %" for value in final(of, (setting, ours)).values()
            )
            print(f"{ours} seed by seed, {setting}: {each}")


def the_agent_that_tuned_took(of: Evidence) -> None:
    """Print what decides the rule of `taught.toml`, the first line, and what else is said of it."""
    untaught, taught = "glimpse, untaught", "glimpse, taught"
    wheres: list[dict[str, str]] = [{}, *({"partition": split} for split in SPLITS)]
    for name, measure in (("proxy score", proxy), ("accuracy", final), ("early", early)):
        for where in wheres:
            place = ", ".join(where.values()) or "all settings"
            for agent in (untaught, taught):
                for other in (OURS, CONTROL, "power-of-choice"):
                    told = minus(of, agent, other, of.where(**where), measure)
                    print(f"{name}, {agent} minus {other}, {place}: {told}")
        print(
            f"{name}, taught minus untaught:",
            minus(of, taught, untaught, of.study.settings, measure),
        )


def how_far_the_rule_holds(of: Evidence) -> None:
    """Print the proxy scores of all beside `glimpse`, and what is left without some of the runs."""
    settings, agent = of.study.settings, "glimpse, untaught"
    for variant in (v for v in of.study.variants if v != OURS):
        told = minus(of, variant, OURS, settings, proxy)
        print(f"proxy score, {variant} minus {OURS}: {told}")
    few = [s for s in settings if "20 visible" not in s]
    print("the rule without 20 visible clients:", minus(of, agent, OURS, few, proxy))
    for name, measure in (("rule", proxy), ("accuracy", final)):
        told = minus(of, agent, OURS, settings, fresh(measure))
        print(f"the {name} without the seeds that chose the recipe: {told}")


def fresh(measure: Measure) -> Measure:
    """Return a measure without the seeds that chose the recipe."""

    def some(of: Evidence, arm: Arm) -> Values:
        return {s: v for s, v in measure(of, arm).items() if s not in CHOSE_THE_RECIPE}

    return some


def contexts_and_clusters(shelf: Shelf) -> None:
    """Print H changed together with horizon and window, and larger clusters for both choosers."""
    history = Evidence(shelf.study("fig6_history").study, {})
    fashion = history.where(data="fashion")
    for together in (v for v in history.study.variants if "also" in v):
        for other in ("H=1", "H=5", CONTROL):
            print(f"{together} minus {other}, Fashion:", minus(history, together, other, fashion))
    selection = Evidence(shelf.study("fig7_selection").study, {})
    for variant in (OURS, CONTROL):
        pairs = [
            ((large, variant), (small, variant))
            for large in selection.study.settings
            for small in selection.study.settings
            if _same_share(selection, large, small)
        ]
        print(f"20 visible minus 10, the same share, {variant}:", text(contrast(selection, pairs)))


def _same_share(of: Evidence, large: str, small: str) -> bool:
    """True for 20 and 10 visible clients, partition and share of the chosen the same."""
    a, b = of.config(large), of.config(small)
    mobile = a["visibility.kind"] == b["visibility.kind"] == "mobile"
    sizes = a["visibility.cluster_size"], b["visibility.cluster_size"]
    alike = a["data.partition"] == b["data.partition"]
    return mobile and sizes == (20, 10) and alike and a["selection.k"] == 2 * b["selection.k"]


if __name__ == "__main__":
    shelf = Shelf(Path(__file__).parents[1])
    by_partition(shelf)
    with_adam(Evidence(shelf.study("recipe_adam").study, shelf.paper("paper_table1")))
    near_the_paper(shelf)
    as_printed_and_released(Evidence(shelf.study("presets").study, {}))
    the_agent_that_tuned_took(taught := Evidence(shelf.study("taught").study, {}))
    how_far_the_rule_holds(taught)
    contexts_and_clusters(shelf)
