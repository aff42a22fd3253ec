"""`fedglimpse verify` names every damaged file of a run, a sweep, or on its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from command_line import fedglimpse
from fedglimpse.cli.main import app
from fedglimpse.errors import UserError
from fedglimpse.runs.experiment import Stopped, run
from fedglimpse.storage import store

RUN = ["rounds=4", "data.clients=8", "visibility.cluster_size=4", "checkpoint.every=2"]
SWEEP = """
title = "A sweep"
methods = ["fedavg", "fedavg-window"]
[base]
seeds = [0]
rounds = 2
[[settings]]
name = "digits"
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run, a policy and a sweep."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "s.toml").write_text(SWEEP)
    words = ["method=glimpse", *RUN, "agent.save=policy.pt", "checkpoint.keep_models=2"]
    for command in (["run", *words, "--out", "run"], ["sweep", "s.toml", "--out", "sweep"]):
        done = fedglimpse(*command, "-q", cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


FILES = [
    *(f"run/{name}" for name in ("config.toml", "environment.json", "summary.json")),
    *(f"run/{name}" for name in ("rounds.jsonl", "checkpoint.pt", "manifest.json")),
    "run/models/round-000002.pt",
    "policy.pt",
    "sweep/sweep.json",
    "sweep/cells/digits--fedavg--s0/rounds.jsonl.gz",
    "sweep/cells/digits--fedavg--s0/summary.json",
]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_named(name: str, results: Path, tmp_path: Path) -> None:
    copy = tmp_path / "r"
    shutil.copytree(results, copy)
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    folder = name if name == "policy.pt" else name.partition("/")[0]
    done = fedglimpse("verify", folder, cwd=copy)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "is damaged" in line and name in line]
    assert "Traceback" not in done.stderr


def test_whole_results_pass(results: Path) -> None:
    for name in ("run", "sweep", "policy.pt"):
        done = fedglimpse("verify", name, cwd=results)
        assert done.returncode == 0, done.stderr
        assert " 0 damaged, 0 without checksum" in done.stdout


@pytest.mark.parametrize("command", ["verify", "report"])
def test_a_changed_record_of_an_unfinished_run_is_named(command: str, tmp_path: Path) -> None:
    rounds_left = iter([False, False, True])
    settings = {"rounds": 4, "data.clients": 8, "visibility.cluster_size": 4}
    with pytest.raises(Stopped):
        run(settings, tmp_path / "run", should_stop=lambda: next(rounds_left))
    assert fedglimpse("verify", "run", cwd=tmp_path).returncode == 0
    records = tmp_path / "run" / "rounds.jsonl"
    records.write_text(records.read_text().replace('"reward":0.', '"reward":0.1', 1))
    done = fedglimpse(command, "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "rounds.jsonl is damaged" in done.stderr


def test_records_that_are_missing_are_damage(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "run", tmp_path / "run")
    (tmp_path / "run" / "rounds.jsonl").unlink()
    done = fedglimpse("verify", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "records are missing" in done.stderr


def test_files_of_an_older_version_have_no_checksum(
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are reported and resumed, and one line says that they are not verified."""
    monkeypatch.setattr(store, "_warned", set())
    shutil.copytree(results / "run", tmp_path / "run")
    (tmp_path / "run" / "manifest.json").unlink()
    done = fedglimpse("verify", "run", cwd=tmp_path)
    assert done.returncode == 0
    assert "3 without checksum" in done.stdout
    assert fedglimpse("report", "run", cwd=tmp_path).returncode == 0
    resumed = fedglimpse("run", "--out", "run", "--resume", "-q", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert len([r for r in caplog.records if "not verified" in r.getMessage()]) == 1


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_verify_is_a_users_mistake(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["verify", str(tmp_path / name)])
    assert isinstance(done.exception, UserError)
    assert done.exception.key == "PATH"
