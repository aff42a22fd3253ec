"""Retired settings: runs refuse them by name, stored results go on showing them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedglimpse.config import retired
from fedglimpse.config.loading import (
    build,
    parse_overrides,
    read_stored,
    read_toml,
    resolve,
    resolve_stored,
)
from fedglimpse.config.retired import Retired
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.runs.folder import run_identity, stored_config
from fedglimpse.studies.report.analysis import command
from fedglimpse.studies.results.load import load_study
from mistakes import mistake


@pytest.fixture(autouse=True)
def fake_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(retired.KEYS, "agent.patience", Retired(0.0, "it changed nothing"))
    hashed = {"sha1": Retired("table", "it was no better")}
    monkeypatch.setitem(retired.VALUES, "agent.identity", hashed)


@pytest.mark.parametrize("make", [resolve, build])
@pytest.mark.parametrize("default", [0.0, 0])
def test_a_retired_key_at_its_default_is_dropped(make: Any, default: float) -> None:
    assert make({"rounds": 3, "agent.patience": default}) == make({"rounds": 3})


@pytest.mark.parametrize("make", [resolve, build])
@pytest.mark.parametrize("value", [0.5, False, "0.0", [0.0]])
def test_a_retired_key_at_another_value_is_refused(make: Any, value: Any) -> None:
    with mistake("agent.patience"):
        make({"agent.patience": value})


def test_a_retired_value_of_a_key_that_stays_is_refused() -> None:
    with mistake("agent.identity"):
        resolve({"agent.identity": "sha1"})
    assert resolve({"agent.identity": "table"}).agent.identity == "table"


def test_the_refusal_names_key_value_lesson_and_tag() -> None:
    with pytest.raises(UserError) as caught:
        resolve(parse_overrides(["agent.patience=0.5"]))
    for fragment in ("agent.patience=0.5", "it changed nothing", "study-2026"):
        assert fragment in str(caught.value)


@pytest.mark.parametrize("read", [read_stored, resolve_stored])
def test_reading_shows_what_was_stored(read: Any) -> None:
    values = {"agent.patience": 0.5, "agent.identity": "sha1", "rounds": 7}
    stored = read(values)
    assert {k: stored.flat()[k] for k in values} == values
    assert stored.config.rounds == 7
    assert set(stored.flat()) == {*Config().flat(), "agent.patience"}


def test_a_stored_default_is_the_run_of_today() -> None:
    config = Config().flat()
    assert run_identity(config | {"agent.patience": 0.0}) == run_identity(config)
    assert run_identity(config | {"agent.patience": 0.5}) != run_identity(config)
    assert "patience" not in command(config | {"agent.patience": 0.0}, [0])
    assert "agent.patience=0.5" in command(config | {"agent.patience": 0.5}, [0])


def test_an_old_run_folder_is_read_but_not_resumed(tmp_path: Path) -> None:
    for name, value in (("old", 0.5), ("default", 0.0)):
        (tmp_path / name).mkdir()
        text = Config().to_toml().replace("[agent]\n", f"[agent]\npatience = {value}\n")
        (tmp_path / name / "config.toml").write_text(text)
    (tmp_path / "new").mkdir()
    today = Config(seeds=(1,))
    (tmp_path / "new" / "config.toml").write_text(today.to_toml())
    cells = load_study(tmp_path).cells
    assert {cell.variant for cell in cells} == {
        "fedavg (agent.patience=0.5)",
        "fedavg (agent.patience=0.0)",
    }
    assert stored_config(tmp_path / "default") == Config()
    assert stored_config(tmp_path / "old", to_run=False) == Config()
    assert read_toml(tmp_path / "old" / "config.toml")["agent.patience"] == 0.5
    with mistake("agent.patience"):
        stored_config(tmp_path / "old")
