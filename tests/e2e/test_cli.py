"""What a user types, and what the command answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import fedglimpse

ROOT = Path(__file__).parents[2]


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "rounds.jsonl").read_text()
    return [{**json.loads(line), "seconds": 0} for line in text.splitlines()]


MISTAKES = [  # what the user typed, and what the sentence must name
    ("run data.nam=digits", "data.nam"),
    ("run method=fedavgg", "fedavgg"),
    ("run method=no_such_module:build", "method=no_such_module:build"),
    ("run model.name=no_such_module:net", "model.name=no_such_module:net"),
    ("run visibility.kind=no_such_module:p", "visibility.kind=no_such_module:p"),
    ("run data.name=mnist", "mnist"),
    ("run selection.k=0", "selection.k=0"),
    ("run selection.k=1000", "selection.k=1000"),
    ("run visibility.cluster_size=1000", "visibility.cluster_size=1000"),
    ("run data.partition=label_skew data.classes_per_client=11", "11"),
    ("run data.alpha=0", "data.alpha=0"),
    ("run engine.device=tpu", "tpu"),
    ("run engine.precision=bf16 engine.device=cpu", "engine.precision=bf16"),
    ("run preset=papr", "papr"),
    ("run no_such_file.toml", "no_such_file.toml"),
    ("run data.clients=5000", "5000"),
    ("run data.proxy=100000", "100000"),
    ("run visibility.kind=trace visibility.trace=nowhere.csv", "nowhere.csv"),
    ("run --rounds 3", "rounds=3"),
    ("run --seed=4", "seeds=[4]"),
    ("run --resume", "--out"),
    ("compare fedavg", "at least two"),
    ("compare fedavg nope", "nope"),
    ("compare fedavg fedavg", "'fedavg' twice"),
    ("compare fedavg mifa method=glimpse rounds=1", "method=glimpse"),
    ("compare fedavg oracle-balance", "options.allow_oracle=true"),
    ("compare fedavg oort options.nope=1", "options.nope"),
    ("compare fedavg mifa aggregate.everywhere=true", "aggregate.everywhere=true"),
    ("compare fedavg mifa --target 5", "--target 5.0"),
    ("compare fedavg mifa --target nan", "--target nan"),
    ("compare fedavg mifa --data.clients -q", "data.clients=VALUE"),
    ("data fetch mnist", "mnist"),
    ("teach rounds=2 --policy .", "--policy=."),
    ("teach fedavg --policy p.pt", "method=fedavg"),
    ("teach method=fedavg --policy p.pt", "method=fedavg"),
    ("teach --also selection.kk=3 --policy p.pt", "selection.kk"),
    ("teach --also 'selection.k=3 --policy p.pt", "--also 'selection.k=3"),
    ("teach preset=tuned-1 --policy p.pt", "agent.identity=none"),
]


@pytest.mark.parametrize(("words", "named"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_one_sentence_and_writes_nothing(
    words: str, named: str, tmp_path: Path
) -> None:
    arguments = words.split(" ")
    if arguments[0] in ("run", "compare"):
        arguments += ["--out", "out"]
    done = fedglimpse(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert named in done.stderr
    assert not list(tmp_path.iterdir())


def test_missing_and_corrupt_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGLIMPSE_DATA", str(tmp_path))
    words = ("run", "data.name=cifar10", "--out", str(tmp_path / "o"))
    done = fedglimpse(*words)
    assert (done.returncode, "fedglimpse data fetch cifar10" in done.stderr) == (2, True)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (tmp_path / "cifar-10-batches-bin" / name).write_bytes(b"damaged")
    done = fedglimpse(*words)
    assert done.returncode == 2
    assert "md5" in done.stderr.lower() or "checksum" in done.stderr.lower()
    assert not (tmp_path / "o").exists()


def test_compare_prints_a_table(tmp_path: Path) -> None:
    out = tmp_path / "c"
    words = ["fedavg", "fedavg-window", "rounds=3", "seeds=[0,1]", "-q", "--out", str(out)]
    done = fedglimpse("compare", *words)
    assert done.returncode == 0, done.stderr
    assert "| fedavg-window |" in done.stdout
    assert str(out) in done.stdout
    assert (out / "comparison.md").read_text() in done.stdout


def test_compare_checks_every_folder_before_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "c"
    alone = fedglimpse("run", "method=mifa", "rounds=1", "-q", "--out", str(out / "mifa"))
    assert alone.returncode == 0
    done = fedglimpse("compare", "fedavg", "mifa", "rounds=2", "-q", "--resume", "--out", str(out))
    assert done.returncode == 2
    assert "rounds=1" in done.stderr
    assert not (out / "fedavg").exists()


def test_a_comparison_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "c" / "comparison.md").mkdir(parents=True)
    words = ["fedavg", "fedavg-window", "rounds=1", "-q", "--out", str(tmp_path / "c")]
    done = fedglimpse("compare", *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("fedglimpse: Could not write to")
    assert "Traceback" not in done.stderr


def test_a_policy_is_pretrained_and_used(tmp_path: Path) -> None:
    small = ["data.name=digits", "rounds=12", "evaluate.every=12", "agent.d_token=8"]
    words = ["teach", *small, "seeds=[0,1]", "--also", "selection.k=3 data.partition=dirichlet"]
    words += ["--lessons", "3", "--policy", "policies/one.pt", "-q"]
    done = fedglimpse(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained on 2 runs, 24 rounds" in done.stdout
    assert "of 2 runs held out" in done.stdout
    use = ["method=glimpse", "agent.load=policies/one.pt", "agent.frozen=true"]
    done = fedglimpse("run", *small, *use, "--out", "a", "-q", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {line["behaviour"] for line in lines(tmp_path / "a")} == {"greedy"}


def test_the_method_of_a_file_is_not_overridden_by_teach(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('method = "fedavg"\n')
    done = fedglimpse("teach", "own.toml", "--policy", "p.pt", cwd=tmp_path)
    assert (done.returncode, "method=fedavg" in done.stderr) == (2, True)


def test_settings_of_an_agent_that_a_method_does_not_have_are_named(tmp_path: Path) -> None:
    words = ("agent.lr=0.1", "agent.gamma=0.8", "rounds=1", "--quiet")
    done = fedglimpse("run", "method=fedavg", *words, cwd=tmp_path)
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("agent.lr, agent.gamma")
    done = fedglimpse("run", "method=glimpse", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_resuming_where_there_is_no_run(tmp_path: Path) -> None:
    done = fedglimpse("run", "--resume", cwd=tmp_path)
    assert (done.returncode, "runs/digits-fedavg" in done.stderr) == (2, True)
    (tmp_path / "there").mkdir()
    done = fedglimpse("run", "--resume", "--out", "there", cwd=tmp_path)
    assert (done.returncode, "--out there" in done.stderr) == (2, True)
    assert [*(tmp_path / "there").iterdir()] == []
    done = fedglimpse("run", "--resume", "rounds=1", "--quiet", cwd=tmp_path)
    assert done.returncode == 0
    assert "digits-fedavg: nothing there to resume" in done.stderr
    done = fedglimpse("run", "--resume", "--quiet", cwd=tmp_path)  # now there is one
    assert (done.returncode, done.stderr) == (0, "")
    done = fedglimpse("compare", "fedavg", "mifa", "--resume", "rounds=1", "-q", cwd=tmp_path)
    assert "runs/compare: nothing there to resume" in done.stderr


def test_help_explains_arguments() -> None:
    text = " ".join(fedglimpse("run", "--help").stdout.split())
    assert text.count("A TOML file and key=value settings, such as data.name=digits") == 1
    assert "docs/settings.md" in text
    text = " ".join(fedglimpse("theory", "--help").stdout.split())
    assert text.count("Run folders, or a folder of runs") == 1
    assert ("[default: 0" in text, "\\" in text) == (True, False)


def test_the_other_commands_answer() -> None:
    assert "fedavg-window" in fedglimpse("methods").stdout
    assert {m["name"] for m in json.loads(fedglimpse("methods", "--json").stdout)} >= {"fedavg"}
    assert "digits" in fedglimpse("data", "status").stdout
    assert "torch" in fedglimpse("doctor").stdout
    assert fedglimpse("--version").stdout.startswith("fedglimpse ")


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
    words = ["run", "method=my_method:build", "model.name=my_net:Net", "rounds=3", "-q"]
    for name in ("a", "b"):  # twice: a dropout layer must not spoil reproducibility
        done = fedglimpse(*words, "--out", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    records = lines(tmp_path / "a")
    assert len(records) == 3
    assert all("mean_norm" in record for record in records)
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
def test_an_error_of_users_code_is_one_sentence_and_the_run_resumes(
    tmp_path: Path, name: str, fault: str, part: str
) -> None:
    code, words = tmp_path / "my_failing.py", ["run", "method=my_failing:build", "rounds=4"]
    words += ["checkpoint.every=1", "--quiet", "--out", "a"]
    code.write_text(FAILING.format(name=name, fault=fault))
    done = fedglimpse(*words, cwd=tmp_path)
    assert (done.returncode, part in done.stderr) == (2, True), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert len(lines(tmp_path / "a")) == 2
    code.write_text(FAILING.format(name=name, fault="pass"))
    done = fedglimpse(*words, "--resume", cwd=tmp_path)
    assert (done.returncode, len(lines(tmp_path / "a"))) == (0, 4), done.stderr


def test_an_error_that_is_not_the_users_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedglimpse.runs.experiment.summarise", None)
    (tmp_path / "my_failing.py").write_text(FAILING.format(name="select", fault="pass"))
    done = fedglimpse("run", "method=my_failing:build", "rounds=1", "--out", "a", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (1, True), done.stderr
