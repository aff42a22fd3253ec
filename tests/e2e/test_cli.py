"""The command as a user types it: real processes, real files, real signals."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from signalled import command, cuts

ROOT = Path(__file__).parents[2]
FEDGLIMPSE = [sys.executable, "-m", "fedglimpse"]
RUN = [*FEDGLIMPSE, "run", "data.name=digits", "method=fedavg"]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **extra}


def call(*words: str, cwd: Path = ROOT, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FEDGLIMPSE, *words], cwd=cwd, env=environment(**extra), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "rounds.jsonl").read_text()
    return [{**json.loads(line), "seconds": 0} for line in text.splitlines()]


def signalled(name: str, at: int, out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    words = ("run", "data.name=digits", "method=fedavg", "rounds=30", "seeds=[0,1]", *words)
    return subprocess.run(
        [*command(name, at, out), *words, "--out", str(out)], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "a"
    done = call("run", "data.name=digits", "method=fedavg", "rounds=30", "seeds=[0,1]",
                "--out", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    return out


def test_a_run_writes_every_round_once(undisturbed: Path) -> None:
    records = lines(undisturbed)
    assert len(records) == 60
    assert {(r["lane"], r["round"]) for r in records} == {
        (lane, t) for lane in (0, 1) for t in range(30)
    }
    assert sorted(p.name for p in undisturbed.iterdir()) == [
        "checkpoint.pt", "config.toml", "environment.json", "rounds.jsonl", "summary.json",
    ]  # fmt: skip


def test_killed_five_times_it_ends_with_the_same_records(undisturbed: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "a", tmp_path / "b"
    operations = int(signalled("SIGKILL", 0, whole, "checkpoint.every=3").stdout.split()[-1])
    for at in cuts(random.Random(7), operations):
        done = signalled("SIGKILL", at, out, "checkpoint.every=3", "--resume")
        assert done.returncode == -signal.SIGKILL, done.stdout
    done = signalled("SIGKILL", 0, out, "checkpoint.every=3", "--resume")
    assert done.returncode == 0, done.stderr
    assert lines(out) == lines(undisturbed)


def test_ctrl_c_ends_cleanly_and_the_run_goes_on(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "c"
    done = signalled("SIGINT", 20, out)
    assert done.returncode == 130, done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert 0 < len(lines(out)) < 60
    assert call("run", "--out", str(out), "--resume").returncode == 0
    assert lines(out) == lines(undisturbed)


BAD = [
    (["run", "data.nam=digits"], "Did you mean 'data.name'"),
    (["run", "method=fedavgg"], "Did you mean 'fedavg'"),
    (["run", "method=no_such_module:build"], "no_such_module"),
    (["run", "data.name=mnist"], "mnist"),
    (["run", "selection.k=0"], "selection.k=0"),
    (["run", "selection.k=1000"], "selection.k=1000"),
    (["run", "visibility.cluster_size=1000"], "cluster_size=1000"),
    (["run", "data.partition=label_skew", "data.classes_per_client=11"], "11"),
    (["run", "data.alpha=0"], "data.alpha=0"),
    (["run", "engine.device=tpu"], "engine.device='tpu'"),
    (["run", "engine.precision=bf16", "engine.device=cpu"], "bf16"),
    (["run", "preset=papr"], "papr"),
    (["run", "no_such_file.toml"], "no_such_file.toml"),
    (["run", "data.clients=5000"], "5000"),
    (["run", "data.proxy=100000"], "100000"),
    (["run", "visibility.kind=trace", "visibility.trace=nowhere.csv"], "nowhere.csv"),
    (["run", "model.name=no_such_module:net"], "no_such_module"),
    (["compare", "fedavg"], "at least two"),
    (["compare", "fedavg", "nope"], "Unknown method 'nope'"),
    (["compare", "fedavg", "fedavg"], "'fedavg' twice"),
    (["compare", "fedavg", "oracle-balance"], "options.allow_oracle=true"),
    (["compare", "fedavg", "oort", "options.nope=1"], "options.nope"),
    (["compare", "fedavg", "mifa", "aggregate.everywhere=true"], "aggregate.everywhere=true"),
    (["compare", "fedavg", "mifa", "--target", "5"], "--target 5.0"),
    (["compare", "fedavg", "mifa", "--target", "nan"], "--target nan"),
    (["run", "data.name=mnist"], "or your own as 'pkg.mod:factory'"),
    (["run", "--rounds", "3"], "There is no option --rounds: write rounds=3"),
    (["run", "--seed=4"], "write seeds=[4]"),
    (["compare", "fedavg", "mifa", "--data.clients", "-q"], "write data.clients=VALUE"),
    (["run", "--resume"], "out is not there, so there is nothing to resume"),
    (["data", "fetch", "mnist"], "mnist"),
]


@pytest.mark.parametrize(("words", "part"), BAD, ids=lambda v: " ".join(v)[:50])
def test_mistakes_are_one_sentence_and_exit_code_2(
    words: list[str], part: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    where = ["--out", str(out)] if words[0] != "data" else []
    done = call(*words, *where, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not out.exists()


def test_missing_and_corrupt_data_files(tmp_path: Path) -> None:
    done = call("run", "data.name=cifar10", "--out", str(tmp_path / "o"),
                FEDGLIMPSE_DATA=str(tmp_path))  # fmt: skip
    assert (done.returncode, "fedglimpse data fetch cifar10" in done.stderr) == (2, True)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (tmp_path / "cifar-10-batches-bin" / name).write_bytes(b"damaged")
    done = call("run", "data.name=cifar10", "--out", str(tmp_path / "o"),
                FEDGLIMPSE_DATA=str(tmp_path))  # fmt: skip
    assert done.returncode == 2
    assert "md5" in done.stderr.lower() or "checksum" in done.stderr.lower()
    assert not (tmp_path / "o").exists()


def test_a_full_disk_ends_in_one_sentence(tmp_path: Path) -> None:
    """A file-size limit stands in for a full disk: the checkpoint cannot be written."""
    out = tmp_path / "o"
    words = " ".join([*RUN, "rounds=6", "checkpoint.every=2", "--quiet", "--out", str(out)])
    limited = f"trap '' XFSZ; ulimit -f 12; exec {words}"
    done = subprocess.run(
        ["bash", "-c", limited], cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Could not write" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert call("run", "--out", str(out), "--resume").returncode == 0
    assert [r["round"] for r in lines(out)] == list(range(6))


def test_compare_prints_a_table(tmp_path: Path) -> None:
    done = call("compare", "fedavg", "fedavg-window", "rounds=3", "seeds=[0,1]", "-q",
                "--out", str(tmp_path / "c"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| fedavg-window |" in done.stdout
    assert str(tmp_path / "c") in done.stdout
    assert (tmp_path / "c" / "comparison.md").read_text() in done.stdout


def test_compare_looks_at_every_folder_before_it_plays(tmp_path: Path) -> None:
    out = tmp_path / "c"
    assert call("run", "method=mifa", "rounds=1", "-q", "--out", str(out / "mifa")).returncode == 0
    done = call("compare", "fedavg", "mifa", "rounds=2", "-q", "--resume", "--out", str(out))
    assert done.returncode == 2
    assert "rounds=1" in done.stderr
    assert not (out / "fedavg").exists()


def test_ctrl_c_in_compare_names_the_command_that_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "two words"
    words = ["compare", "fedavg", "fedavg-window", "rounds=3", "--target", "0.4", "--quiet"]
    done = subprocess.run(
        [*command("SIGINT", 8, out), *words, "--out", str(out)], cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    advice = shlex.split(done.stderr.partition("Continue with: fedglimpse ")[2])
    assert advice[:4] == words[:4]
    assert advice[-1] == "--resume"
    assert not (out / "comparison.md").exists()
    again = call(*advice)
    assert again.returncode == 0, again.stderr
    assert "rounds to 40.0 %" in (out / "comparison.md").read_text()


def test_a_comparison_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "c" / "comparison.md").mkdir(parents=True)
    done = call(
        "compare", "fedavg", "fedavg-window", "rounds=1", "-q", "--out", str(tmp_path / "c")
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("fedglimpse: Could not write to")
    assert "Traceback" not in done.stderr


def test_a_policy_is_taught_and_used(tmp_path: Path) -> None:
    small = ["data.name=digits", "rounds=12", "evaluate.every=12", "agent.d_token=8"]
    words = ["teach", *small, "seeds=[0,1]", "--also", "selection.k=3 data.partition=dirichlet"]
    words += ["--lessons", "3", "--policy", "policies/one.pt", "-q"]
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained on 2 runs, 24 rounds" in done.stdout
    assert "of 2 runs held out" in done.stdout
    use = ["method=glimpse", "agent.load=policies/one.pt", "agent.frozen=true"]
    done = call("run", *small, *use, "--out", "a", "-q", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {line["behaviour"] for line in lines(tmp_path / "a")} == {"greedy"}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["rounds=2", "--policy", "."], "--policy=. cannot be written"),
        (["fedavg", "--policy", "p.pt"], "write method=fedavg"),
        (["--also", "selection.kk=3", "--policy", "p.pt"], "selection.kk"),
        (["--also", "'selection.k=3", "--policy", "p.pt"], "--also 'selection.k=3"),
        (["preset=tuned-1", "--policy", "p.pt"], "agent.identity=none"),
    ],
)
def test_mistakes_in_teaching(tmp_path: Path, words: list[str], part: str) -> None:
    done = call("teach", *words, cwd=tmp_path)
    assert (done.returncode, part in done.stderr) == (2, True), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_file_that_says_otherwise_is_heard(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('method = "fedavg"\n')
    done = call("teach", "own.toml", "--policy", "p.pt", cwd=tmp_path)
    assert (done.returncode, "method=fedavg learns no policy" in done.stderr) == (2, True)


def test_settings_of_an_agent_that_is_not_there_are_named(tmp_path: Path) -> None:
    words = ("agent.lr=0.1", "agent.gamma=0.7", "rounds=1", "--quiet")
    done = call("run", "method=fedavg", *words, cwd=tmp_path)
    assert done.returncode == 0
    said = "agent.lr, agent.gamma have no effect with method=fedavg: only method=glimpse"
    assert done.stderr.startswith(said)
    done = call("run", "method=glimpse", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_compare_takes_methods_as_words(tmp_path: Path) -> None:
    done = call("compare", "fedavg", "mifa", "method=glimpse", "rounds=1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "compare has method=glimpse beside fedavg, mifa: name methods as words." in done.stderr


def test_resuming_nothing_is_said(tmp_path: Path) -> None:
    done = call("run", "--resume", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stdout
    assert "runs/digits-fedavg is not there, so there is nothing to resume" in done.stderr
    (tmp_path / "there").mkdir()
    done = call("run", "--resume", "--out", "there", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stdout
    assert "--out there holds no run, so there is nothing to resume" in done.stderr
    assert [*(tmp_path / "there").iterdir()] == []
    done = call("run", "--resume", "rounds=1", "--quiet", cwd=tmp_path)
    assert done.returncode == 0
    assert "digits-fedavg: nothing there to resume: a new run begins" in done.stderr
    done = call("run", "--resume", "--quiet", cwd=tmp_path)  # the usual folder holds one now
    assert (done.returncode, done.stderr) == (0, "")
    done = call("compare", "fedavg", "mifa", "--resume", "rounds=1", "-q", cwd=tmp_path)
    assert "runs/compare: nothing there to resume: a new run begins" in done.stderr


def test_help_tells_what_arguments_are() -> None:
    told = " ".join(call("run", "--help").stdout.split())
    assert told.count("A TOML file and key=value settings, such as data.name=digits") == 1
    assert "docs/settings.md" in told
    told = " ".join(call("theory", "--help").stdout.split())
    assert told.count("Run folders, or a folder of runs") == 1
    assert ("[default: 0" in told, "\\" in told) == (True, False)


def test_the_other_commands_answer() -> None:
    assert "fedavg-window" in call("methods").stdout
    assert {m["name"] for m in json.loads(call("methods", "--json").stdout)} >= {"fedavg"}
    assert "digits" in call("data", "status").stdout
    assert "torch" in call("doctor").stdout
    assert call("--version").stdout.startswith("fedglimpse ")


def test_a_users_own_method_and_model(tmp_path: Path) -> None:
    example = (ROOT / "examples" / "my_method.py").read_text()
    assert len(example.splitlines()) < 50
    (tmp_path / "my_method.py").write_text(example)
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.f = nn.Linear(64, 10)\n        self.drop = nn.Dropout(0.2)\n"
        "    def forward(self, x):\n        return self.f(self.drop(x.flatten(1)))\n"
    )
    for name in ("a", "b"):  # twice: a dropout layer must not spoil reproducibility
        done = call("run", "method=my_method:build", "model.name=my_net:Net", "rounds=3",
                    "--out", name, cwd=tmp_path)  # fmt: skip
        assert done.returncode == 0, done.stderr
    records = lines(tmp_path / "a")
    assert len(records) == 3
    assert all("mean_norm" in r for r in records)
    assert records == lines(tmp_path / "b")


FAILING = """from fedglimpse import Method
from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import UniformRandom


class Failing(UniformRandom):
    def {name}(self, seen, *rest):
        if seen.round_num == 2:
            {fault}
        return super().{name}(seen, *rest)


def build(setting):
    return Method(Failing(), WeightedDelta())
"""


@pytest.mark.parametrize(
    ("name", "fault", "part"),
    [
        ("select", "raise KeyError('q')", "KeyError: 'q' (my_failing.py:9)"),
        ("feedback", "import json; json.loads('')", "(my_failing.py:9)"),
        (
            "select",
            "from fedglimpse.config.loading import load; load(3)",
            "not int (my_failing.py:9)",
        ),
        ("select", "return None", "Failing.select answered round 2 with None"),
    ],
)
def test_an_error_of_users_code_is_one_sentence_and_the_run_goes_on(
    tmp_path: Path, name: str, fault: str, part: str
) -> None:
    code, words = tmp_path / "my_failing.py", ["run", "method=my_failing:build", "rounds=4"]
    words += ["checkpoint.every=1", "--quiet", "--out", "a"]
    code.write_text(FAILING.format(name=name, fault=fault))
    done = call(*words, cwd=tmp_path)
    assert (done.returncode, part in done.stderr) == (2, True), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert len(lines(tmp_path / "a")) == 2
    code.write_text(FAILING.format(name=name, fault="pass"))
    done = call(*words, "--resume", cwd=tmp_path)
    assert (done.returncode, len(lines(tmp_path / "a"))) == (0, 4), done.stderr


def test_an_error_that_is_not_the_users_keeps_its_traceback(tmp_path: Path) -> None:
    # nothing of theirs fails
    fault = "from fedglimpse.simulation.world import World; World.play = None"
    (tmp_path / "my_failing.py").write_text(FAILING.format(name="select", fault=fault))
    done = call("run", "method=my_failing:build", "rounds=4", "--out", "a", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, True), done.stderr
