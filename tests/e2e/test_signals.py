"""Runs that are killed, interrupted or out of disk space: real processes and real signals."""

from __future__ import annotations

import json
import random
import shlex
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from command_line import fedglimpse
from processes import fedglimpse_process, fedglimpse_signalled, run_process
from signalled import cuts

RUN = ["run", "data.name=digits", "method=fedavg", "rounds=30", "seeds=[0,1]", "checkpoint.every=3"]


def records(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "rounds.jsonl").read_text()
    return [{**json.loads(line), "seconds": 0} for line in text.splitlines()]


@dataclass(frozen=True)
class Undisturbed:
    """A run that nothing stopped."""

    folder: Path
    operations: int  # on files


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    out = tmp_path_factory.mktemp("undisturbed") / "a"
    done = fedglimpse_signalled("SIGKILL", 0, out, *RUN, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    return Undisturbed(out, int(done.stdout.split()[-1]))


def test_a_run_writes_every_round_once(undisturbed: Undisturbed) -> None:
    written = [(record["lane"], record["round"]) for record in records(undisturbed.folder)]
    assert sorted(written) == [(lane, t) for lane in (0, 1) for t in range(30)]
    assert sorted(path.name for path in undisturbed.folder.iterdir()) == [
        "checkpoint.pt", "config.toml", "environment.json", "manifest.json", "rounds.jsonl",
        "summary.json",
    ]  # fmt: skip


def test_killed_five_times_it_ends_with_the_same_records(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    out = tmp_path / "b"
    words = [*RUN, "--out", str(out), "--resume"]
    for operation in cuts(random.Random(7), undisturbed.operations):
        done = fedglimpse_signalled("SIGKILL", operation, out, *words)
        assert done.returncode == -signal.SIGKILL, done.stdout
    done = fedglimpse_process(*words)
    assert done.returncode == 0, done.stderr
    assert records(out) == records(undisturbed.folder)


def test_ctrl_c_ends_cleanly_and_the_run_resumes(undisturbed: Undisturbed, tmp_path: Path) -> None:
    out = tmp_path / "c"
    done = fedglimpse_signalled("SIGINT", 20, out, *RUN, "--out", str(out))
    assert done.returncode == 130, done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert 0 < len(records(out)) < 60
    assert fedglimpse("run", "--out", str(out), "--resume").returncode == 0
    assert records(out) == records(undisturbed.folder)


def test_ctrl_c_in_compare_names_the_command_that_resumes(tmp_path: Path) -> None:
    out = tmp_path / "two words"
    words = ["compare", "fedavg", "fedavg-window", "rounds=3", "--target", "0.4", "--quiet"]
    words += ["--workers", "1"]  # operations on files are counted in one process
    done = fedglimpse_signalled("SIGINT", 8, out, *words, "--out", str(out))
    assert done.returncode == 130, done.stderr
    advice = shlex.split(done.stderr.partition("Continue with: fedglimpse ")[2])
    assert advice[:4] == words[:4]
    assert advice[-1] == "--resume"
    assert not (out / "comparison.md").exists()
    resumed = fedglimpse(*advice)
    assert resumed.returncode == 0, resumed.stderr
    assert "rounds to 40.0 %" in (out / "comparison.md").read_text()


def test_a_full_disk_ends_in_one_sentence(tmp_path: Path) -> None:
    """A file-size limit stands in for a full disk: the checkpoint cannot be written."""
    out = tmp_path / "o"
    words = [sys.executable, "-m", "fedglimpse", "run", "data.name=digits", "method=fedavg"]
    words += ["rounds=6", "checkpoint.every=2", "--quiet", "--out", str(out)]
    limited = f"trap '' XFSZ; ulimit -f 12; exec {shlex.join(words)}"
    done = run_process(["bash", "-c", limited])
    assert done.returncode == 2, done.stderr
    assert "Could not write" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert fedglimpse("run", "--out", str(out), "--resume").returncode == 0
    assert [record["round"] for record in records(out)] == list(range(6))


def test_a_mistake_ends_a_process_with_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    done = fedglimpse_process("run", "data.nam=digits", "--out", "a", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("fedglimpse: Unknown key 'data.nam'.")
    assert not list(tmp_path.iterdir())
