"""Figures of the other studies that the prose of docs/reproduction.md speaks of.

    python tools/figures_of_studies.py

As `figures_of_table1.py`, which has those of the accuracy table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fedglimpse.report.analysis import analyse
from figures_of_table1 import CONTROL, text
from reproduction.evidence import OURS, Evidence, contrast, final
from reproduction.shelf import Shelf

SPLITS = ("dirichlet", "label_skew")
WITH_OURS = (  # studies of `glimpse` as `tuned-1` has it beside the control
    "table1", "fig7_selection", "agent_study", "history_study", "lean_study", "proof_study",
    "taught_study",
)  # fmt: skip


def minus(of: Evidence, one: str, other: str, settings: Sequence[str]) -> str:
    """Return the difference of two variants, pooled over settings."""
    return text(contrast(of, [((s, one), (s, other)) for s in settings]))


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
        ours, theirs = final(of, (setting, OURS)), final(of, (setting, CONTROL))
        each = ", ".join(f"{100 * (ours[s] - theirs[s]):+.1f}" for s in ours if s in theirs)
        print(f"Adam, {OURS} minus {CONTROL} seed by seed, {setting}: {each}")


def near_the_paper(shelf: Shelf) -> None:
    """Print how near figures are to the published ones, with both recipes, in the same settings."""
    settings = shelf.study("recipe_adam").study.settings
    for name in ("table1", "recipe_adam"):
        rows = [r for r in analyse(shelf.study(name).study).rows if r.setting in settings]
        gaps = {
            (r.setting, r.variant): (r.paper.difference.mean, r.beside.figure.std)
            for r in rows
            if r.paper is not None and r.beside is not None
        }
        for who in ("baselines", OURS):
            mine = [g for (_, variant), g in gaps.items() if (variant == OURS) == (who == OURS)]
            near = sum(abs(gap) <= std for gap, std in mine)
            distance = 100 * fmean(abs(gap) for gap, _ in mine)
            print(
                f"{name}, {who}: {near} of {len(mine)} within one published standard deviation, "
                f"mean distance {distance:.1f} points"
            )


def unfinished_presets(shelf: Shelf) -> None:
    """Print how far runs of `presets` came that were not finished."""
    for cell in shelf.study("presets").study.cells:
        if cell.state == "unfinished" and cell.facts is not None:
            climb = cell.facts.climb
            print(
                f"{cell.variant}, {cell.setting}, seed {cell.seed}: {climb.played} rounds, best "
                f"mean over ten scores {100 * climb.heights[-1]:.1f} %"
            )


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
    unfinished_presets(shelf)
    contexts_and_clusters(shelf)
