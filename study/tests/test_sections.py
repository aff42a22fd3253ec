"""Every generated part of the page, from results that are whole, in pieces, or not there."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest

from fedglimpse.studies.report.analysis import final_accuracies
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.stored import write_study
from fedglimpse.studies.results.study import CellResult, Study
from fedglimpse.studies.sweep.plan import read_plan
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep
from played import ROOT, Came, jitter, played
from reproduction.claims import all_claims, claims_table, rules_list
from reproduction.curves import curves
from reproduction.pooled import pooled
from reproduction.section import section, settings
from reproduction.shelf import CHOSE_THE_RECIPE, TUNED_ON, Shelf, Stored
from reproduction.speed import on_gpu, speed
from worlds import WORLDS, table_holds

SMALL = """
title = "Small"
claim = "it runs"
control = "fedavg"
methods = ["fedavg", "glimpse"]
[base]
seeds = [0, 1]
rounds = 12
data.name = "digits"
agent.learn_start = 2
agent.n_step = 1
agent.updates_per_round = 1
[[settings]]
name = "digits, mobile"
target = 0.2
[[settings]]
name = "digits, random"
visibility.kind = "random"
visibility.p = 0.3
[[settings]]
name = "digits, later"
data.partition = "label_skew"
"""
NAMES = ("table1", "recipe_adam", "presets", "fig6_history", "fig7_selection", "fig8_identity",
         "components")  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sweep that was cut short, and the plans of the real studies."""
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(ROOT / "plans", root / "plans")
    file = root / "plans" / "small.toml"
    file.write_text(SMALL)
    only = ["setting=digits, mobile", "setting=digits, random"]
    run_sweep(read_plan(file), root / "runs", SweepOptions(quiet=True, only=only))
    shutil.rmtree(root / "runs" / "cells" / "digits-random--glimpse--s1")
    (root / "results" / "small").mkdir(parents=True)
    write_study(load_study(root / "runs"), root / "results" / "small" / "study.json.gz")
    return root


def test_a_sweep_in_pieces_gives_every_part_of_a_section(root: Path) -> None:
    text = section(Shelf(root).study("small"))
    assert "What is tested: it runs" in text
    assert "| digits, random |" in text  # more settings than variants: they go down the page
    assert "(1 of 2)" in text
    each = settings(Shelf(root).study("small"))
    assert each.count("<details>") == each.count("</details>") == 2  # nothing of the third setting
    assert "Costs until 20.0 %:" in each
    assert each.count("Costs until 90 % of the best accuracy here") == 2
    assert each.count("Participation:") == 2
    assert "Not run yet: 5 of 12 cells. Reason: GPU time." in text
    assert "| digits, random | 4 | 3 | 0 | 0 | 1 |" in text
    assert "| digits, later | 4 | 0 | 0 | 0 | 4 |" in text
    assert "Not as in the file" not in text


def test_accuracies_are_those_of_the_report(root: Path) -> None:
    stored = Shelf(root).study("small")
    row = next(r for r in stored.results.rows if r.setting == "digits, mobile" and not r.control)
    assert row.spread is not None
    assert f"{100 * row.spread.mean:.1f} ± {100 * (row.spread.std or 0):.1f}" in section(stored)


def test_what_is_pooled_is_the_largest_whole_block_of_two_seeds(root: Path) -> None:
    study = Shelf(root).study("small").study
    ours, theirs = (final_accuracies(study.of("digits, mobile", v)) for v in ("glimpse", "fedavg"))
    assert len(ours) == len(theirs) == 2  # the other setting that was run has one seed of both
    gap = fmean(ours[s] - theirs[s] for s in ours)
    line = next(x for x in pooled(Shelf(root).study("small")).splitlines() if x[:5] == "| gli")
    assert re.match(rf"\| glimpse \| {100 * gap:+.1f} ".replace("-", "−"), line)
    assert "(1 × 2)" in line


def test_pooling_tells_small_differences(tmp_path: Path) -> None:
    better = {"dpp": 0.61, "herd": 0.59}

    def world(cell: CellResult, config: dict[str, object]) -> Came:
        return Came(better.get(cell.variant, 0.6) + 1e-4 * cell.seed * (cell.variant in better))

    text = pooled(store(played("table1", world), tmp_path, "table1"))
    tables = re.split("Those that do not average.*|Settings .* chose the recipe:", text)
    first, matched, untouched = (
        {line.split(" | ")[0][2:]: line for line in table.splitlines()} for table in tables
    )
    assert "▲ (10 × 3)" in untouched["dpp"]
    assert "▲ (10 × 5)" in matched["dpp"].split(" | ")[1]
    assert "glimpse" not in matched  # averages, as `fedavg` does not
    assert "▲ (10 × 5)" in first["dpp"].split(" | ")[1]
    assert "▼ (10 × 5)" in first["herd"].split(" | ")[1]
    assert "▲" not in first["fedprox"]
    assert "fedavg-window" not in first


def test_the_seeds_that_chose_the_recipe_are_those_of_its_file() -> None:
    shelf = Shelf(ROOT)
    chose = {cell.seed for cell in shelf.study("recipe_study").study.cells}
    assert frozenset(chose) == CHOSE_THE_RECIPE
    data = {cell.config["data.name"] for cell in shelf.study("recipe_study").study.cells}
    for name in {claim.study for claim in all_claims(shelf)} - {"recipe_study", "recipe_adam"}:
        cells = [c for c in shelf.study(name).study.cells if c.config["preset"] == "tuned"]
        tuned = {c.seed for c in cells if c.config["data.name"] in data} & chose
        assert (name in TUNED_ON) == bool(tuned), name


def test_data_of_which_one_seed_was_run_are_not_pooled(tmp_path: Path) -> None:
    def world(cell: CellResult, config: dict[str, object]) -> Came | None:
        return None if config["data.name"] == "cifar10" and cell.seed else Came(0.6)

    text = pooled(store(played("table1", world), tmp_path, "table1"))
    assert "(6 × 5)" in text.partition("Those that do not average")[0]  # not ten of one


@pytest.mark.parametrize(("seeds", "beside"), [(2, 2), (3, 0), (1, 0)])
def test_data_of_two_seeds_are_shown_with_the_others_and_left_out(
    seeds: int, beside: int, tmp_path: Path
) -> None:
    """The noise of two seeds covers that of five; a table that would say the same is not shown."""

    def world(cell: CellResult, config: dict[str, object]) -> Came | None:
        few = config["data.name"] == "cifar10"
        return None if few and cell.seed >= seeds else Came(0.6 + jitter(cell))

    text = pooled(store(played("table1", world), tmp_path, "table1"))
    shown = text.partition("which chose the recipe")[0]
    assert shown.count("The same without cifar10, of which two seeds were run:") == beside
    assert ("(6 × 5)" in shown) == (seeds < 3)
    assert ("(10 × 2–5)" in shown) == (seeds == 2)


def test_curves_have_a_panel_for_each_setting_that_was_run(root: Path, tmp_path: Path) -> None:
    drawn = ElementTree.fromstring(curves(Shelf(root).study("small")))
    name = "{http://www.w3.org/2000/svg}"
    panels = drawn.findall(f"{name}g")
    assert [panel.find(f"{name}text").text for panel in panels] == [  # type: ignore[union-attr]
        "digits, mobile",
        "digits, random",
    ]
    assert [len(panel.findall(f"{name}polyline")) for panel in panels] == [2, 2]
    bare = dataclasses.replace(Shelf(root).study("small").study, cells=[])
    assert "polyline" not in curves(Stored("bare", bare, ()))


def test_curves_are_means_over_seeds(tmp_path: Path) -> None:
    def world(cell: CellResult, config: dict[str, object]) -> Came | None:
        return Came(0.5 + 0.1 * cell.seed) if cell.variant == "dpp" else None

    text = curves(store(played("table1", world), tmp_path, "table1"))
    ends = {line.split('"')[1].split()[-1] for line in text.splitlines() if "polyline" in line}
    mean, top = 0.7, 0.71  # the panel ends one point above the highest, 30 points high
    assert ends == {f"300.0,{190 * (top - mean) / 0.3:.1f}"}


def test_runs_that_are_not_what_the_file_says_now_are_named(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "changed")
    file = tmp_path / "changed" / "plans" / "small.toml"
    file.write_text(SMALL.replace("rounds = 12", "rounds = 20"))
    text = section(Shelf(tmp_path / "changed").study("small"))
    assert "Not as in the file: `rounds` 12 (file: 20)." in text


def test_a_variant_that_left_the_file_is_still_shown(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "changed")
    file = tmp_path / "changed" / "plans" / "small.toml"
    file.write_text(SMALL.replace('"fedavg", "glimpse"]', '"fedavg"]'))
    assert "glimpse" in section(Shelf(tmp_path / "changed").study("small"))


@pytest.mark.parametrize("name", NAMES)
def test_without_results_a_study_is_one_line(root: Path, name: str) -> None:
    text = section(Shelf(root).study(name))
    assert text.startswith("Not run yet (")
    assert "\n" not in text


def store(study: Study, root: Path, name: str) -> Stored:
    """Put a study on a shelf and take it back."""
    (root / "results" / name).mkdir(parents=True)
    if not (root / "plans").exists():
        shutil.copytree(ROOT / "plans", root / "plans")
    write_study(study, root / "results" / name / "study.json.gz")
    return Shelf(root).study(name)


@pytest.mark.parametrize("name", NAMES)
def test_whole_studies_give_their_sections(tmp_path: Path, name: str) -> None:
    stored = store(played(name, WORLDS[name][0]), tmp_path, name)
    text = section(stored)
    assert f"All {len(stored.study.cells)} cells have finished." in text
    assert settings(stored).count("<details>") == len(stored.study.settings)
    assert "not run yet" not in text + settings(stored)
    assert all(setting in text for setting in stored.study.settings)
    assert ("paper 76.2 ± 1.8" in text) == (name in ("table1", "recipe_adam", "presets"))


def test_parts_in_several_files_are_put_together(tmp_path: Path) -> None:
    def only(seeds: set[int]) -> Study:
        return played("table1", lambda c, k: table_holds(c, k) if c.seed in seeds else None)

    store(only({0, 1}), tmp_path, "table1")
    write_study(only({1, 2, 3, 4}), tmp_path / "results" / "table1" / "study-more.json.gz")
    stored = Shelf(tmp_path).study("table1")
    assert stored.study.cells == played("table1", table_holds).cells


def test_runs_of_other_studies_are_not_missing(tmp_path: Path) -> None:
    lender = played("table1", lambda c, k: table_holds(c, k) if c.seed == 1 else None)
    store(lender, tmp_path, "table1")
    whole = played("fig8_identity", WORLDS["fig8_identity"][0])
    own = [c for c in whole.cells if c.variant == "without identity"]
    stored = store(dataclasses.replace(whole, cells=own), tmp_path, "fig8_identity")
    lent = [c for c in stored.study.cells if c.state == "finished" and c not in own]
    assert {(c.variant, c.seed) for c in lent} == {("fedavg-window", 1), ("identity table", 1)}
    assert stored.lenders == {"table1": len(lent)} == {"table1": 8}
    theirs = {(c.setting, c.variant): c.facts for c in lender.cells if c.facts is not None}
    assert all(
        c.facts == theirs[c.setting, c.variant.replace("identity table", "glimpse")] for c in lent
    )
    assert "not repeated: 8 of `table1`." in section(stored)


def test_a_run_of_its_own_comes_before_another_studys(tmp_path: Path) -> None:
    store(played("table1", table_holds), tmp_path, "table1")
    study = played("fig8_identity", WORLDS["fig8_identity"][0])
    stored = store(study, tmp_path, "fig8_identity")
    assert stored.study.cells == study.cells
    assert not stored.lenders


def test_failures_are_counted_with_their_reason(tmp_path: Path) -> None:
    study = played("table1", table_holds)
    cells = [
        dataclasses.replace(c, state="failed", reason="no memory", facts=None)
        if c.variant == "dpp"
        else c
        for c in study.cells
    ]
    stored = store(dataclasses.replace(study, cells=cells), tmp_path, "table1")
    assert "- 50 failed: no memory" in section(stored)
    assert "> 0 (0 of 5)" in settings(stored)


def test_claims_are_shown_with_and_without_results(root: Path, tmp_path: Path) -> None:
    bare = claims_table(Shelf(root))
    assert "holds: 0; does not hold: 0; inconclusive: 0; not run yet: 40." in bare
    for name, (holds, _) in WORLDS.items():
        store(played(name, holds), tmp_path, name)
    full = claims_table(Shelf(tmp_path))
    assert "40 claims. holds: 40; does not hold: 0; inconclusive: 0; not run yet: 0." in full
    rules = rules_list(Shelf(root)).splitlines()
    assert len(rules) == 40
    assert rules[0].startswith("1. Holds if")


def on_a_gpu(study: Study, seconds: float) -> Study:
    def cell(old: CellResult) -> CellResult:
        assert old.facts is not None
        facts = dataclasses.replace(old.facts, seconds=seconds + old.seed)
        config = {**old.config, "engine.device": "auto", "engine.precision": "bf16"}
        gpu = {"gpu": "NVIDIA X"}
        return dataclasses.replace(old, facts=facts, environment=gpu, config=config)

    return dataclasses.replace(study, cells=[cell(c) for c in study.cells])


def test_speed_counts_shared_runs_once_and_gpus_only(tmp_path: Path) -> None:
    table = played("table1", table_holds)
    stored = store(on_a_gpu(table, 2.0), tmp_path / "a", "table1")
    rounds = 600 * len(table.cells)
    text = speed([stored, stored])
    assert text.splitlines()[-1].startswith("| **all**, each run once |  | NVIDIA X |")
    assert f"| {rounds:,} |" in text.splitlines()[-1]
    assert len(on_gpu([*stored.study.cells, *stored.study.cells])) == len(table.cells)
    again = store(on_a_gpu(table, 3.0), tmp_path / "b", "table1")  # the same runs, played again
    assert len(on_gpu([*stored.study.cells, *again.study.cells])) == 2 * len(table.cells)
    without = store(played("presets", lambda cell, config: Came(0.5)), tmp_path / "c", "presets")
    assert speed([without]) == "No round was run on a GPU yet."
    assert speed([]) == "No round was run on a GPU yet."


def test_the_committed_recipe_study_has_what_speed_needs() -> None:
    stored = Shelf(ROOT).study("recipe_study")
    assert len(on_gpu(stored.study.cells)) == len(stored.study.cells)
    assert "NVIDIA H200" in speed([stored])
