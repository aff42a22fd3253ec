"""Every sweep file of the study: it names its claim, its cells are sound, and it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fedglimpse.errors import UserError
from fedglimpse.studies.sweep.plan import Cell, Plan, configs_of, read_plan
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep

ROOT = Path(__file__).parents[1]
PLANS = sorted(p for p in (ROOT / "plans").glob("*.toml") if not p.stem.startswith("paper_"))
RETIRED = [p for p in PLANS if p.read_text(encoding="utf-8").startswith("# Runs with the git tag")]
FILES = [*(p for p in PLANS if p not in RETIRED), ROOT.parent / "examples" / "quick.toml"]


@pytest.fixture(autouse=True)
def in_the_folder_of_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep files name stored policies as seen from there."""
    monkeypatch.chdir(ROOT)


def covering(cells: Sequence[Cell]) -> list[Cell]:
    """Return few cells that hold every setting and every variant."""
    kept, settings, variants = [], set[str](), set[str]()
    for cell in [*diagonal(cells), *cells]:
        if cell.setting not in settings or cell.variant not in variants:
            kept.append(cell)
            settings.add(cell.setting)
            variants.add(cell.variant)
    return kept


def diagonal(cells: Sequence[Cell]) -> list[Cell]:
    settings = list(dict.fromkeys(c.setting for c in cells))
    variants = list(dict.fromkeys(c.variant for c in cells))
    count = max(len(settings), len(variants))
    wanted = {(settings[i % len(settings)], variants[i % len(variants)]) for i in range(count)}
    return [c for c in cells if (c.setting, c.variant) in wanted]


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_smoke_covers_every_setting_and_variant(file: Path, tmp_path: Path) -> None:
    plan = read_plan(file, smoke=True)
    cells = covering(plan.cells)
    assert {c.setting for c in cells} == {c.setting for c in plan.cells}
    assert {c.variant for c in cells} == {c.variant for c in plan.cells}
    ended = run_sweep(
        replace(plan, cells=cells), tmp_path / "o", SweepOptions(quiet=True, lanes=16)
    )
    assert ended.failed == {}
    assert ended.done == len(cells)


@pytest.mark.parametrize("file", RETIRED, ids=lambda p: p.stem)
def test_plans_with_retired_settings_are_read_and_not_run(file: Path) -> None:
    plan = read_plan(file, to_run=False)
    assert plan.claim
    assert plan.control is not None
    with pytest.raises(UserError, match="study-2026"):
        read_plan(file)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_smoke_of_the_whole_grid(file: Path, tmp_path: Path) -> None:
    plan = read_plan(file, smoke=True)
    ended = run_sweep(plan, tmp_path / "o", SweepOptions(quiet=True))
    assert (ended.done, ended.failed) == (len(plan.cells), {})


@cache
def full(file: Path) -> Plan:
    return read_plan(file)


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_files_say_what_they_test_and_carry_a_control(file: Path) -> None:
    plan = full(file)
    assert plan.claim
    assert plan.control is not None
    methods = {c.overrides["method"] for c in plan.cells}
    assert methods & {"fedavg", "fedavg-window"}, "a gain is a gain over a control"


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_every_method_of_a_setting_has_the_same_rounds_and_seeds(file: Path) -> None:
    plan = full(file)
    seeds: dict[str, dict[str, list[int]]] = {}
    rounds: dict[str, set[int]] = {}
    configs = configs_of(plan.cells, {})
    for cell in plan.cells:
        seeds.setdefault(cell.setting, {}).setdefault(cell.variant, []).append(cell.seed)
        rounds.setdefault(cell.setting, set()).add(configs[cell.id].rounds)
    for setting, own in seeds.items():
        assert len(rounds[setting]) == 1
        assert len({tuple(s) for s in own.values()}) == 1


def test_the_table_is_the_papers_grid() -> None:
    plan = full(ROOT / "plans" / "table1.toml")
    assert len(plan.cells) == 10 * 10 * 5
    configs = configs_of(plan.cells, {}).values()
    rounds = {c.data.name: c.rounds for c in configs}
    assert rounds == {"cifar10": 1500, "fashion": 600, "hapt": 600}
    assert {c.selection.k for c in configs} == {5}
    assert {c.visibility.cluster_size for c in configs} == {10}
    assert {c.method for c in configs} == {
        "fedprox", "ha-edgeflow", "fedawac", "f3ast", "glimpse",
        "fedavg", "fedavg-window", "herd", "dpp", "oracle-balance",
    }  # fmt: skip


@pytest.mark.parametrize("stem", ["fig3_curves", "fig4_final", "fig5_efficiency"])
def test_figures_of_the_table_share_its_runs(stem: str) -> None:
    table = {c.id: c for c in full(ROOT / "plans" / "table1.toml").cells}
    for cell in full(ROOT / "plans" / f"{stem}.toml").cells:
        assert table[cell.id] == cell
