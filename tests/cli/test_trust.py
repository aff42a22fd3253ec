"""Reading results imports no code that they name, unless --trust is given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from command_line import Finished, fedglimpse
from fedglimpse.cli.main import app
from fedglimpse.cli.options import ReadingCommand
from mistakes import mistake
from processes import fedglimpse_process
from rewriting import rewrite

SIZES = ["rounds=2", "data.clients=8", "visibility.cluster_size=4", "checkpoint.keep_models=1"]
WORKING_COMMANDS = {"run", "compare", "sweep", "teach", "bench", "methods", "schema", "doctor"}
MODULE = """
from pathlib import Path

Path(__file__).with_name("imported").touch()

import torch
from fedglimpse.data import Dataset
from fedglimpse.data.sources import load


def data():
    return load("digits")


def split(labels, num_clients, generator, settings):
    return torch.randperm(len(labels), generator=generator).tensor_split(num_clients)


def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""
SWEEP = """
title = "Mine"
methods = ["fedavg", "fedavg-window"]
[base]
seeds = [0]
rounds = 2
[[settings]]
name = "digits"
"""
SETTINGS = ["data.name=strange:data", "data.partition=strange:split", "model.name=strange:model"]


def test_a_command_reads_results_without_their_code_or_is_known_to_run_code() -> None:
    for command in app.registered_commands:
        name = str(command.name)
        assert (command.cls is ReadingCommand) != (name in WORKING_COMMANDS), name


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a module and the results of a run with it."""
    folder = tmp_path_factory.mktemp("strangers")
    (folder / "strange.py").write_text(MODULE)
    done = fedglimpse("run", *SETTINGS, *SIZES, "--out", "o", cwd=folder)
    assert done.returncode == 0, done.stderr
    (folder / "imported").unlink()
    return folder


def read(folder: Path, *words: str) -> Finished:
    """Run a command in a folder with a module that must not be imported."""
    done = fedglimpse(*words, cwd=folder)
    assert not (folder / "imported").exists()
    return done


def test_a_report_has_the_class_counts_that_the_run_stored(strangers: Path) -> None:
    done = read(strangers, "report", "o")
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    assert '"counts"' in (strangers / "o" / "report" / "report.html").read_text()


def test_a_report_leaves_out_what_only_their_code_knows(
    strangers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(strangers, tmp_path / "s")
    (tmp_path / "s" / "o" / "partition.json").unlink()
    done = read(tmp_path / "s", "report", "o")
    assert done.returncode == 0, done.stderr
    assert "--trust" in caplog.text
    assert len(caplog.records) == 1
    done = fedglimpse("report", "o", "--trust", cwd=tmp_path / "s")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s" / "imported").exists()


def test_theory_needs_their_code_and_says_so(strangers: Path) -> None:
    done = read(strangers, "theory", "o")
    assert done.returncode == 2
    assert "--trust" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    done = fedglimpse("theory", "o", "--trust", cwd=strangers)
    assert done.returncode == 0, done.stderr
    (strangers / "imported").unlink()


def test_verifying_imports_nothing(strangers: Path) -> None:
    done = read(strangers, "verify", "o")
    assert done.returncode == 0, done.stderr
    assert " 0 damaged" in done.stdout


@pytest.mark.parametrize("name", ["os:abort", "signal:pause", "strange.deeper:data"])
def test_whatever_a_configuration_names_is_left_alone(
    name: str, strangers: Path, tmp_path: Path
) -> None:
    """In a process of its own, which `os.abort` would end."""
    shutil.copytree(strangers, tmp_path / "s")
    (tmp_path / "s" / "strange.py").unlink()
    (tmp_path / "s" / "strange").mkdir()
    (tmp_path / "s" / "strange" / "__init__.py").write_text(MODULE)
    config = tmp_path / "s" / "o" / "config.toml"
    text = config.read_text()
    for own in ("strange:data", "strange:split", "strange:model"):
        text = text.replace(own, name)
    rewrite(config, text.replace('method = "fedavg"', f'method = "{name}"'))
    (tmp_path / "s" / "o" / "partition.json").unlink()
    for command, code in (("report", 0), ("theory", 2), ("verify", 0)):
        done = fedglimpse_process(command, "o", cwd=tmp_path / "s")
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    assert not list((tmp_path / "s").rglob("imported"))


def test_runs_that_another_sweep_has_finished_are_found_without_their_code(
    strangers: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(SWEEP)
    shutil.copytree(strangers, tmp_path / "s")
    (tmp_path / "s" / "o" / "partition.json").unlink()
    done = fedglimpse(
        "sweep", str(file), "--out", str(tmp_path / "m"), "--without", "o",
        cwd=tmp_path / "s",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "s" / "imported").exists()


def test_a_trusted_name_that_leads_nowhere_is_a_users_mistake(tmp_path: Path) -> None:
    from fedglimpse.plugins import importing_no_own_code, load_callable

    with importing_no_own_code(refused=False), mistake("data.name"):
        load_callable("nowhere:data", "data.name")
