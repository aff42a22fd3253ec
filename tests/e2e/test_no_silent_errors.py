"""What would give wrong results silently, or lose some, is refused in one sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedglimpse.cli.main import app
from fedglimpse.config.loading import build, load, read_toml, resolve
from fedglimpse.errors import UserError
from fedglimpse.methods.base import Setting, UniformRandom
from fedglimpse.methods.registry import MODULES
from fedglimpse.runs.experiment import Stopped, run
from fedglimpse.storage.lock import locked
from fedglimpse.studies.results.load import load_study
from fedglimpse.types import Method, Outcome
from mistakes import mistake, mistake_naming

SHORT = {"rounds": 6, "checkpoint.every": 2, "evaluate.every": 2}


class Logging(UniformRandom):
    """Random selection with a prescribed log and state."""

    logged: dict[str, Any] = {}  # noqa: RUF012
    state: dict[str, Any] = {}  # noqa: RUF012

    def feedback(self, outcome: Outcome) -> dict[str, Any]:
        return self.logged

    def state_dict(self) -> dict[str, Any]:
        return self.state


def logging(setting: Setting) -> Method:
    return Method(Logging(), setting.temporal_window())


OWN = {"method": f"{__name__}:logging", **SHORT}


def stopped_after(rounds: int, config: dict[str, Any], out: Path) -> None:
    rounds_left = iter(range(rounds - 1, -1, -1))
    with pytest.raises(Stopped):
        run(config, out, should_stop=lambda: next(rounds_left) == 0)


@pytest.mark.parametrize("before", [{"options.server_lr": 0.1}, {}])
def test_resuming_with_other_options_is_refused(before: dict[str, Any], tmp_path: Path) -> None:
    f3ast = {"method": "f3ast", **SHORT}
    stopped_after(2, f3ast | before, tmp_path / "o")
    other = {} if before else {"options.server_lr": 0.1}
    with mistake("options.server_lr"):
        run(f3ast | other, tmp_path / "o", resume=True)
    run(f3ast | before, tmp_path / "o", resume=True)


@pytest.mark.parametrize("name", ["accuracy", "round", "uplink_bytes"])
def test_a_selector_cannot_log_by_a_measured_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Logging, "logged", {name: 1.0})
    with mistake_naming(f"'{name}'"):
        run(OWN)


def test_a_logged_number_called_q_is_not_read_as_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Logging, "logged", {"q": 1.0})
    run(OWN, tmp_path / "o")
    assert load_study(tmp_path / "o").cells[0].state == "finished"


@pytest.mark.parametrize("method", MODULES)
def test_no_method_ignores_an_option(method: str) -> None:
    oracle = {"options.allow_oracle": True} if method == "oracle-balance" else {}
    with mistake_naming("options.typo_here"):
        run({"method": method, "options.typo_here": 1, **SHORT, **oracle})


@pytest.mark.parametrize("size", [200, 0, None])
def test_missing_rounds_are_noticed(size: int | None, tmp_path: Path) -> None:
    stopped_after(4, {"method": "fedavg", **SHORT}, tmp_path / "o")
    rounds = tmp_path / "o" / "rounds.jsonl"
    if size is None:
        rounds.unlink()
    else:
        os.truncate(rounds, size)
    with mistake("--out"):
        run({"method": "fedavg", **SHORT}, tmp_path / "o", resume=True)
    assert not rounds.exists() or rounds.stat().st_size == size


def test_a_run_folder_belongs_to_one_process(tmp_path: Path) -> None:
    config = {"method": "fedavg", **SHORT}
    stopped_after(2, config, tmp_path / "o")
    with (
        locked(tmp_path / "o", "run"),
        mistake_naming(f"process {os.getpid()}"),
    ):
        run(config, tmp_path / "o", resume=True)
    run(config, tmp_path / "o", resume=True)
    assert not list((tmp_path / "o").glob("*.lock"))


def test_a_report_never_overwrites_its_results(tmp_path: Path) -> None:
    run({"method": "fedavg", **SHORT}, tmp_path / "o")
    before = sorted(p.name for p in (tmp_path / "o").iterdir())
    done = CliRunner().invoke(app, ["report", str(tmp_path / "o"), "--out", str(tmp_path / "o")])
    assert isinstance(done.exception, UserError)
    assert "is the folder of the results themselves" in str(done.exception)
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == before


@pytest.mark.parametrize("state", [np.zeros(2), Path("x")])
def test_a_state_that_cannot_be_read_back_is_refused_at_once(
    state: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Logging, "state", {"own": state})
    with mistake_naming(str(tmp_path / "o")):
        run(OWN, tmp_path / "o")
    assert not (tmp_path / "o" / "checkpoint.pt").exists()


@pytest.mark.parametrize("text", ["p😀.pt", "tab\tand \x7f", 'a "quote" and \\'])
def test_any_text_survives_the_file(text: str, tmp_path: Path) -> None:
    config = resolve({"agent.save": text})
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert build(read_toml(tmp_path / "config.toml")) == config


@pytest.mark.parametrize("word", ["options.x={a=1}", "options.x=2024-01-01", "options.a b=1"])
def test_options_that_no_file_can_hold_are_refused(word: str) -> None:
    with mistake(word.partition("=")[0]):
        load(None, [word])


def test_an_empty_configuration_is_not_resumed(tmp_path: Path) -> None:
    stopped_after(2, {"method": "fedavg", **SHORT}, tmp_path / "o")
    (tmp_path / "o" / "config.toml").write_text("")
    with mistake("--out"):
        run(resolve({}), tmp_path / "o", resume=True)


def test_a_minimum_of_visible_clients_that_cannot_be_met_is_refused() -> None:
    with mistake("visibility.min_visible"):
        run({"visibility.min_visible": 11, **SHORT})
    uneven = {"data.clients": 26, "visibility.min_visible": 10, **SHORT}  # clusters of 8 and 9
    with mistake("visibility.min_visible"):
        run(uneven)


@pytest.mark.parametrize("few", [{"data.samples": 1}, {"data.clients": 1294}])
def test_clients_that_cannot_train_are_refused(few: dict[str, int]) -> None:
    with mistake("data.clients"):
        run({**few, **SHORT})


def test_a_trace_without_effect_is_refused() -> None:
    with mistake("visibility.trace"):
        run({"visibility.trace": "x.csv", **SHORT})


def test_momentum_without_effect_is_refused() -> None:
    with mistake("local.momentum"):
        run({"local.optimizer": "adam", "local.momentum": 0.9, **SHORT})


def test_a_run_that_learnt_nothing_says_so(tmp_path: Path) -> None:
    words = ["run", "local.lr=1e30", "rounds=2", "--out", str(tmp_path / "o"), "-q"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert "no update was used in any of 2 rounds" in done.output


def test_the_file_of_a_policy_is_checked_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "p.pt"):
        with mistake_naming(f"agent.save={place}"):
            run({"method": "glimpse", "agent.save": str(place), **SHORT})
