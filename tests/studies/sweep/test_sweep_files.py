from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from sweeps import SMALL, write

from fedglimpse.errors import UserError
from fedglimpse.studies.sweep.plan import read_plan


def test_a_file_becomes_settings_times_variants_times_seeds(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path))
    assert len(plan.cells) == 8
    assert [(c.setting, c.variant, c.seed) for c in plan.cells[:3]] == [
        ("digits, mobile", "fedavg", 0),
        ("digits, mobile", "fedavg", 1),
        ("digits, mobile", "glimpse", 0),
    ]
    assert plan.cells[2].id == "digits-mobile--glimpse--s0"
    assert (plan.title, plan.claim, plan.control) == ("Small", "it runs", "fedavg")
    assert plan.targets == {"digits, mobile": 0.5}
    assert plan.paper is None


def test_later_tables_win_and_smoke_wins_over_all(tmp_path: Path) -> None:
    text = """
    [base]
    rounds = 1
    local.lr = 0.1
    local.epochs = 1
    [[settings]]
    name = "s"
    local.lr = 0.2
    local.epochs = 2
    [[variants]]
    name = "v"
    method = "fedavg"
    local.epochs = 3
    [smoke]
    local.epochs = 4
    seeds = [7]
    """
    cell = read_plan(write(tmp_path, text)).cells[0]
    config = cell.config({"engine.device": "cpu"})
    assert (config.rounds, config.local.lr, config.local.epochs) == (1, 0.2, 3)
    assert (config.seeds, config.engine.device) == ((0,), "cpu")
    smoked = read_plan(write(tmp_path, text), smoke=True).cells[0]
    assert (smoked.seed, smoked.config({}).local.epochs) == (7, 4)


def test_a_setting_may_have_its_own_seeds_and_variants(tmp_path: Path) -> None:
    text = SMALL.replace(
        'name = "digits, random"', 'name = "r"\nseeds = [5]\nvariants = ["fedavg"]'
    )
    cells = [c for c in read_plan(write(tmp_path, text)).cells if c.setting == "r"]
    assert [(c.variant, c.seed) for c in cells] == [("fedavg", 5)]


def test_a_file_may_take_its_cells_from_another(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "paper_x.toml").write_text("[accuracy]\nfedavg = 0.5\n")
    text = """
    from = "small.toml"
    title = "Part"
    paper = "paper_x.toml"
    pick_settings = ["digits, random"]
    pick_variants = ["fedavg"]
    """
    part, whole = read_plan(write(tmp_path, text, "part.toml")), read_plan(write(tmp_path))
    assert part.title == "Part"
    assert part.paper == {"accuracy": {"fedavg": 0.5}}
    assert list(part.cells) == [
        c for c in whole.cells if (c.setting, c.variant) == ("digits, random", "fedavg")
    ]


BAD = {
    "not TOML": ("title = ", "not valid TOML"),
    "unknown key": ("claims = 'x'\n" + SMALL, "Did you mean 'claim'"),
    "no cells": ("[base]\nrounds = 1\n", "no cells"),
    "nameless": (SMALL.replace('name = "digits, random"', ""), "needs a name"),
    "twice": (SMALL.replace("digits, random", "digits, mobile"), "comes twice"),
    "method and variant": (SMALL + '[[variants]]\nname = "fedavg"\n', "among methods and in"),
    "same folder": (SMALL.replace("digits, random", "Digits mobile"), "share the folder"),
    "control": (SMALL.replace('control = "fedavg"', 'control = "fedag"'), "Did you mean 'fedavg'"),
    "method": (SMALL.replace('"glimpse"]', '"glimps"]'), "Did you mean 'glimpse'"),
    "dotted key": (SMALL.replace("visibility.kind", "visibilty.kind"), "visibilty.kind"),
    "value": (SMALL.replace('"random"', '"rnadom"'), "visibility.kind=rnadom"),
    "target": (SMALL.replace("target = 0.5", "target = 50"), "target = 50"),
    "seeds": (SMALL.replace("seeds = [0, 1]", "seeds = 3"), "seeds=3"),
    "same seed": (SMALL.replace("seeds = [0, 1]", "seeds = [1, 1]"), "[1, 1]"),
    "paper": ('paper = "nowhere.toml"\n' + SMALL, "nowhere.toml"),
    "from": ('from = "nowhere.toml"\n', "nowhere.toml"),
    "picked": ('pick_settings = ["digits"]\n' + SMALL, "no setting 'digits'"),
}


@pytest.mark.parametrize("name", BAD)
def test_mistakes_name_the_file_and_the_fix(name: str, tmp_path: Path) -> None:
    text, part = BAD[name]
    with pytest.raises(UserError) as caught:
        read_plan(write(tmp_path, text))
    assert part in str(caught.value)
    assert "toml" in str(caught.value)


def test_smoke_needs_its_table(tmp_path: Path) -> None:
    text = SMALL[: SMALL.index("[smoke]")]
    assert "smoke" not in tomllib.loads(text)
    with pytest.raises(UserError, match=r"\[smoke\]"):
        read_plan(write(tmp_path, text), smoke=True)
