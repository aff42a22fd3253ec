"""What the command does before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERRUPTED = """
import os, runpy, signal, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

MODULE = sys.argv.pop(1)
signal.signal(signal.SIGINT, getattr(signal, sys.argv.pop(1)))
sys.meta_path.insert(0, CtrlC())
runpy.run_module("fedglimpse", run_name="__main__")
"""
PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # ASCII is all there is


def python(*words: str, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **extra}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, encoding="utf-8",
        timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("fedglimpse.cli.main", "methods"),
        ("rich.table", "methods"),
        ("numpy.dtypes", "doctor"),
        ("torch", "doctor"),
    ],
)
def test_ctrl_c_while_importing_is_one_word(module: str, command: str) -> None:
    done = python("-c", INTERRUPTED, module, "default_int_handler", command)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Stopped.\n")


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    done = python("-c", INTERRUPTED, "torch", "SIG_IGN", "doctor")
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stdout


def test_the_version_is_printed_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['fedglimpse', '--version']; "
        "from fedglimpse.cli.entry import main; "
        "main(); sys.exit(bool({'torch', 'numpy', 'typer'} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fedglimpse ")


def test_the_installed_command_begins_with_the_same_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"fedglimpse": "fedglimpse.cli.entry:main"}


def test_characters_that_the_terminal_cannot_show_are_replaced() -> None:
    code = (
        "from fedglimpse.cli import entry; entry.replace_unencodable_characters(); "
        "print('−6.9 ± 1', chr(0x3b1), chr(0xdce9))"
    )
    assert python("-c", code, PYTHONIOENCODING="ascii").stdout == "-6.9 +- 1 ? ?\n"
    assert python("-c", code, PYTHONIOENCODING="utf-8").stdout == "−6.9 ± 1 α ?\n"


def test_comparing_and_reporting_in_an_ascii_locale(tmp_path: Path) -> None:
    command = ["-m", "fedglimpse"]
    words = ["compare", "fedavg", "mifa", "rounds=2", "-q", "--out", "é"]
    done = python(*command, *words, cwd=tmp_path, **PLAIN)
    assert done.returncode == 0, done.stderr
    done = python(*command, "report", "é", cwd=tmp_path, **PLAIN)
    assert done.returncode == 0, done.stderr
    assert "fedavg" in done.stdout
    assert "−" in (tmp_path / "é" / "report" / "report.html").read_text(encoding="utf-8")


def test_a_setting_that_cannot_be_decoded_is_one_sentence(tmp_path: Path) -> None:
    words = ["-m", "fedglimpse", "run", "rounds=1", "method=glimpse", "agent.save=é.pt"]
    done = python(*words, "--out", "a", cwd=tmp_path, **PLAIN)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "agent.save=" in done.stderr
    assert "LC_ALL=C.UTF-8" in done.stderr
    assert not list(tmp_path.iterdir())
