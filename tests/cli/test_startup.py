"""Help, `methods` and mistakes are answered without torch; a run imports nothing it can do without.

`benchmarks/startup.py` measures how long the answers take.
"""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from processes import run_process

ROOT = Path(__file__).parents[2]
WITHOUT_TORCH = """
import sys
from fedglimpse.cli.entry import main
sys.modules["torch"] = None  # importing it is an error
main()
"""
IMPORTED_BY_A_RUN = """
import atexit
import sys
from fedglimpse.cli.entry import main
atexit.register(lambda: print(*sys.modules))
main()
"""
SLOW_TO_IMPORT = ("sklearn", "scipy", "torch._dynamo", "pandas", "matplotlib")

ANSWERS = (
    "--version",
    "--help",
    "run --help",
    "compare --help",
    "sweep --help",
    "report --help",
    "teach --help",
    "theory --help",
    "bench --help",
    "doctor --help",
    "data --help",
    "data fetch --help",
    "flower new --help",
    "methods",
    "methods --json",
    "schema",
)
MISTAKES = {  # command -> what the answer names
    "runn": "runn",
    "run --rounds 3": "rounds=3",
    "run --quick": "--quick",
    "run fedavg": "method=fedavg",
    "run rouns=3": "rounds",
    "run rounds=many": "rounds",
    "run rounds=0": "rounds",
    "run seeds=[]": "seeds",
    "run preset=tuned-2": "tuned-2",
    "run method=fedavgg": "fedavgg",
    "run data.name=digit": "digits",
    "run data.partition=irid": "iid",
    "run data.alpha=0": "data.alpha",
    "run data.clients=0": "data.clients",
    "run model.name=resnet": "resnet",
    "run visibility.kind=mobil": "mobile",
    "run visibility.cluster_size=101": "visibility.cluster_size",
    "run visibility.min_visible=11": "visibility.min_visible",
    "run selection.k=101": "selection.k",
    "run local.momentum=0.9 local.optimizer=adam": "local.momentum",
    "run agent.heads=3": "agent.heads",
    "run engine.device=tpu": "engine.device",
    "run no_such_file.toml": "no_such_file.toml",
    "compare fedavg": "compare",
    "compare fedavg fedavg": "fedavg",
    "compare fedavg fedavgg": "fedavgg",
    "compare all rouns=3": "rounds",
    "compare fedavg mifa --target 2": "--target",
    "compare fedavg oracle-balance options.allow_oracle=true rounds=x": "rounds",
    "sweep no_such_file.toml": "no_such_file.toml",
    "sweep bad.toml": "rounds",
    "report no_such_folder": "no_such_folder",
    "theory no_such_folder": "no_such_folder",
    "teach rouns=3 --policy p.pt": "rounds",
    "bench round --lanes 0": "--lanes",
}


def without_torch(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_process([sys.executable, "-c", WITHOUT_TORCH, *shlex.split(command)], folder)


@pytest.mark.parametrize("command", ANSWERS)
def test_what_there_is_to_know_needs_no_torch(command: str, tmp_path: Path) -> None:
    done = without_torch(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_are_found_without_torch(command: str, tmp_path: Path) -> None:
    sweep = 'methods = ["fedavg"]\n[base]\nrouns = 3\n[[settings]]\nname = "a"\n'
    (tmp_path / "bad.toml").write_text(sweep)
    done = without_torch(command, tmp_path)
    assert done.returncode == 2, done.stderr
    assert MISTAKES[command] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("method", ["fedavg-window", "glimpse"])
def test_a_run_imports_nothing_slow_but_torch(method: str, tmp_path: Path) -> None:
    words = ["run", f"method={method}", "rounds=1", "--quiet", "--out", "run"]
    done = run_process([sys.executable, "-c", IMPORTED_BY_A_RUN, *words], tmp_path)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert "torch" in imported
    assert not set(SLOW_TO_IMPORT) & set(imported)


@pytest.mark.slow
@pytest.mark.processes
def test_answers_and_the_first_round_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Medians of ten, in seconds of CPU: on an idle core, the time that passes."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    startup = importlib.import_module("startup")
    times = range(startup.REPETITIONS)
    for command in startup.ANSWERS:
        assert startup.typical([startup.answer(command) for _ in times]).cpu <= 0.4, command
    first_rounds = [startup.first_round(startup.RUN) for _ in times]
    assert startup.typical(first_rounds).cpu <= 2.0
