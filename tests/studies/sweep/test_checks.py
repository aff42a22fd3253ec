"""Cells that cannot be run are named before anything is written, wherever they would be played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweeps import SMALL, write

from fedglimpse.errors import UserError
from fedglimpse.studies.sweep import local
from fedglimpse.studies.sweep.plan import read_plan
from fedglimpse.studies.sweep.runner import Engine, SweepOptions, run_sweep

ONE = """
[[settings]]
name = "s"
rounds = 1
[[variants]]
name = "fine"
method = "fedavg"
[[variants]]
name = "wrong"
"""


def elsewhere(*words: Any) -> None:
    raise AssertionError("nothing may be played")


def broken(setting: Any) -> None:
    raise ZeroDivisionError("no client to divide by")


METHODS = {
    "option": ('method = "oort"\noptions.nope = 1', "options.nope"),
    "value": ('method = "oort"\noptions.cutoff = -1', "options.cutoff"),
    "oracle": ('method = "oracle-balance"', "options.allow_oracle=true"),
    "averaged": ('method = "mifa"\naggregate.everywhere = true', "aggregate.everywhere=true"),
}
HERE = {
    "subject": ('data.partition = "subject"', "data.partition=subject"),
    "trace": ('visibility.kind = "trace"\nvisibility.trace = "nowhere.csv"', "nowhere.csv"),
    "model": ('model.name = "no_such_module:net"', "no_such_module"),
    "policy": ('agent.save = "p.pt"', "learns no policy"),
    "broken": ('method = "test_checks:broken"', "ZeroDivisionError: no client"),
}


@pytest.mark.parametrize(
    ("run_packs", "name"),
    [(elsewhere, name) for name in METHODS] + [(local.run_packs, name) for name in METHODS | HERE],
)
def test_a_cell_that_cannot_be_run_is_named(
    run_packs: Engine, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    text, part = (METHODS | HERE)[name]
    plan, out = read_plan(write(tmp_path, ONE + text)), tmp_path / "o"
    with pytest.raises(UserError) as caught:
        run_sweep(plan, out, SweepOptions(quiet=True), run_packs)
    assert str(caught.value).startswith("Setting 's', 'wrong': ")
    assert part in str(caught.value)
    assert not out.exists()


def test_a_cell_that_was_left_out_or_is_done_is_not_looked_at(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, ONE + 'method = "oracle-balance"'))
    ended = run_sweep(plan, tmp_path / "o", SweepOptions(only=["variant=fine"], quiet=True))
    assert (ended.done, ended.failed) == (1, {})


WRONG_KINDS = {
    "base": ("base = 3\n", "base = 3 must be one table"),
    "bases": ("[[base]]\nrounds = 1\n", "base = [{'rounds': 1}] must be one table"),
    "smoke": ("smoke = 3\n", "smoke = 3 must be one table"),
    "paper": ("paper = 3\n", "paper = 3 must be the name of a file"),
    "from": ("from = 3\n", "from = 3 must be the name of a file"),
    "folder": ('from = "."\n', "is a folder"),
    "pick_settings": ("pick_settings = 3\n", "pick_settings = 3 must be a list of names"),
    "pick_variants": ("pick_variants = [3]\n", "pick_variants = [3] must be a list of names"),
    "methods": ('methods = "fedavg"\n', "methods = 'fedavg' must be a list of names"),
    "settings": ("settings = 3\n", "settings = 3 must be tables"),
    "variants": ("[variants]\nname = 'a'\n", "variants = {'name': 'a'} must be tables"),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_a_value_of_the_wrong_kind_is_named(name: str, tmp_path: Path) -> None:
    text, part = WRONG_KINDS[name]
    with pytest.raises(UserError) as caught:
        read_plan(write(tmp_path, text))
    assert part in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_kinds_are_checked_in_the_file_that_has_them(tmp_path: Path) -> None:
    write(tmp_path, SMALL.replace('methods = ["fedavg", "glimpse"]', 'methods = "fedavg"'))
    with pytest.raises(UserError, match=r"small.toml: methods = 'fedavg'"):
        read_plan(write(tmp_path, 'from = "small.toml"\n', "part.toml"))


@pytest.mark.parametrize(
    ("value", "part"),
    [("[]", "without a cell"), ('"fedavg"', "a list of names"), ("3", "a list of names")],
)
def test_variants_of_a_setting_are_a_list_of_some(value: str, part: str, tmp_path: Path) -> None:
    text = SMALL.replace('name = "digits, random"', f'name = "r"\nvariants = {value}')
    with pytest.raises(UserError, match=part) as caught:
        read_plan(write(tmp_path, text))
    assert "setting 'r': variants = " in str(caught.value)


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"folder name of 3[0-9]+ letters") as caught:
        read_plan(write(tmp_path, SMALL.replace("digits, random", "r" * 300)))
    assert "small.toml" in str(caught.value)
