"""A user's own dataset, `data.name=pkg.mod:factory`, in every command that takes one."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from command_line import Finished, fedglimpse
from fedglimpse.config.loading import resolve
from fedglimpse.data import sources
from fedglimpse.runs.build import build_world
from fedglimpse.runs.experiment import Stopped, run
from mistakes import mistake, mistake_naming

CODE = """
import numpy as np
import torch
from torch import nn

from fedglimpse.data import Dataset


def parts(x, y, classes=3, **more):
    return {
        "name": "digits", "label": "Mine", "x_train": x[:300], "y_train": y[:300],
        "x_test": x[300:], "y_test": y[300:], "num_classes": classes, **more,
    }


def images():
    y = torch.arange(360) % 3
    x = torch.rand(360, 2, 5, 4) * 40 + y[:, None, None, None] * 60  # drawn without a seed
    return Dataset(**parts(x.to(torch.uint8), y, subjects=torch.arange(300) % 10))


def table():
    y = np.arange(360) % 4
    x = np.random.default_rng(0).normal(size=(360, 7)) + y[:, None]
    return Dataset(**parts(torch.from_numpy(x), torch.from_numpy(y.astype(np.int16)), np.int64(4)))


def scaled():
    from pathlib import Path
    y = torch.arange(360) % 3
    return Dataset(**parts(y[:, None] * float(Path("scale.txt").read_text()) + torch.zeros(7), y))


def net():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))


def changed(**changes):
    y = torch.arange(360) % 3
    return lambda: Dataset(**{**parts(torch.zeros(360, 4) + y[:, None], y), **changes})


def nan_in_row_7():
    x = torch.zeros(300, 4)
    x[7, 2] = float("nan")
    return x


nothing = lambda: None
dictionary = lambda: parts(torch.zeros(360, 4), torch.arange(360) % 3)
raises = lambda: {}["faces"]
with_argument = lambda folder: None
arrays = changed(x_train=np.zeros((300, 4)))
no_tensor = changed(y_test=None)
one_number = changed(y_test=torch.tensor(3))
other_rows = changed(y_train=torch.arange(299) % 3)
other_test_rows = changed(x_test=torch.zeros(59, 4))
whole_numbers = changed(x_train=torch.zeros(300, 4).long())
no_features = changed(x_train=torch.zeros(300), x_test=torch.zeros(60))
empty_test = changed(x_test=torch.zeros(0, 4), y_test=torch.zeros(0).long())
other_shape = changed(x_test=torch.zeros(60, 5))
other_kind = changed(x_test=torch.zeros(60, 4, dtype=torch.uint8))
not_finite = changed(x_train=nan_in_row_7())
too_large = changed(x_train=torch.full((300, 4), 1e300, dtype=torch.float64))
from_one = changed(y_train=1 + torch.arange(300) % 3)
negative = changed(y_test=torch.arange(60) % 3 - 1)
one_hot = changed(y_train=torch.zeros(300, 3).long())
float_labels = changed(y_train=torch.zeros(300))
one_class = changed(num_classes=1)
half_classes = changed(num_classes=3.5)
other_subjects = changed(subjects=torch.arange(4))
named_subjects = changed(subjects=torch.rand(300))


def unseeded():
    return changed(x_train=torch.from_numpy(np.random.rand(300, 4)))()
"""

MISTAKES = {  # what the sentence must name
    "nothing": "NoneType",
    "dictionary": "dict",
    "raises": "KeyError: 'faces' (own_data.py:",
    "with_argument": "(folder)",
    "no_such": "'no_such'",
    "arrays": "x_train of type ndarray",
    "no_tensor": "y_test of type NoneType",
    "one_number": "y_test of type Tensor",
    "other_rows": "x_train has 300 rows but y_train has 299",
    "other_test_rows": "x_test has 59 rows but y_test has 60",
    "whole_numbers": "x_train of int64",
    "no_features": "x_train of shape (300,)",
    "empty_test": "x_test of shape (0, 4)",
    "other_shape": "shape (4,) in x_train but (5,) in x_test",
    "other_kind": "x_train of float32 but x_test of uint8",
    "not_finite": "1 rows of x_train, first in row 7",
    "too_large": "300 rows of x_train",
    "from_one": "label 3 in y_train",
    "negative": "label -1 in y_test",
    "one_hot": "y_train of int64 and shape (300, 3)",
    "float_labels": "y_train of float32",
    "one_class": "num_classes=1",
    "half_classes": "num_classes=3.5",
    "other_subjects": "subjects has 4",
    "named_subjects": "subjects of float32",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_data.py").write_text(CODE)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    importlib.invalidate_caches()
    return folder


def call(folder: Path, *words: str) -> Finished:
    return fedglimpse(*words, cwd=folder)


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "rounds.jsonl").read_text()
    return [{**json.loads(line), "seconds": 0} for line in text.splitlines()]


SMALL = {"data.clients": 12, "rounds": 3, "visibility.cluster_size": 4, "selection.k": 2}
WORDS = [f"{key}={value}" for key, value in SMALL.items()]


def test_images_are_run_measured_and_reported(folder: Path) -> None:
    words = ["data.name=own_data:images", "model.name=own_data:net", *WORDS]
    done = call(folder, "run", *words, "local.augment=true", "checkpoint.keep_models=1", "-q")
    assert done.returncode == 0, done.stderr
    results = folder / "runs" / "own_data_images-fedavg"
    assert str(results.relative_to(folder)) in done.stdout
    done = call(folder, "theory", str(results), "--trust")
    assert (done.returncode, "own_data:images" in done.stdout) == (0, True), done.stderr
    done = call(folder, "report", str(results))
    assert (done.returncode, "fedavg" in done.stdout) == (0, True), done.stderr
    assert "counts" in (results / "report" / "report.html").read_text()


def test_flat_features_are_compared_with_the_model_that_takes_any_shape(folder: Path) -> None:
    done = call(folder, "compare", "fedavg", "glimpse", "data.name=own_data:table", *WORDS,
                "-q", "--out", "c")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| glimpse |" in done.stdout
    assert call(folder, "report", "c").returncode == 0


def test_a_sweep_takes_own_data(folder: Path) -> None:
    table = "\n".join(f"{key} = {value}" for key, value in SMALL.items())
    head = 'methods = ["fedavg", "mifa"]\n[base]\nseeds = [0]\ndata.name = "own_data:table"\n'
    (folder / "own.toml").write_text(f'{head}{table}\n[[settings]]\nname = "mine"\n')
    done = call(folder, "sweep", "own.toml", "-q")
    assert (done.returncode, "2 cells done" in done.stdout) == (0, True), done.stderr
    (folder / "own.toml").write_text(f'{head}{table}\n[[settings]]\ndata.proxy = 900\nname = "a"\n')
    done = call(folder, "sweep", "own.toml", "-q", "--out", "s")
    assert (done.returncode, "data.proxy=900" in done.stderr) == (2, True), done.stderr
    assert not (folder / "s").exists()


def test_a_stopped_run_resumes_with_the_same_data(here: Path) -> None:
    config = {**SMALL, "data.name": "own_data:images", "checkpoint.every": 1}
    stops = iter([False, True])
    with pytest.raises(Stopped):
        run(config, "a", should_stop=lambda: next(stops))
    assert len(lines(here / "a")) == 2
    done = call(here, "run", "--out", "a", "--resume", "-q")
    assert done.returncode == 0, done.stderr
    run(config, "b")
    assert lines(here / "a") == lines(here / "b")


def test_a_run_is_not_resumed_with_other_data(here: Path) -> None:
    (here / "scale.txt").write_text("1")
    config = {**SMALL, "data.name": "own_data:scaled", "checkpoint.every": 1}
    stops = iter([False, True])
    with pytest.raises(Stopped):
        run(config, "scaled", should_stop=lambda: next(stops))
    (here / "scale.txt").write_text("2")
    done = call(here, "run", "--out", "scaled", "--resume", "-q")
    assert done.returncode == 2
    assert "data.name" in done.stderr
    (here / "scale.txt").write_text("1")
    done = call(here, "run", "--out", "scaled", "--resume", "-q")
    assert done.returncode == 0, done.stderr


def test_a_run_is_not_resumed_with_another_trace(here: Path) -> None:
    trace = "device,ready_start_s,ready_end_s\n" + "".join(f"{i},0,99999\n" for i in range(12))
    (here / "trace.csv").write_text(trace)
    keys = {"visibility.kind": "trace", "visibility.trace": "trace.csv", "checkpoint.every": 1}
    stops = iter([False, True])
    with pytest.raises(Stopped):
        run({**SMALL, **keys}, "traced", should_stop=lambda: next(stops))
    (here / "trace.csv").write_text(trace.replace("99999", "88888"))
    with mistake("visibility.trace"):
        run({**SMALL, **keys}, "traced", resume=True)


def test_subjects_are_clients_where_there_are_some(here: Path) -> None:
    words = {"data.partition": "subject", "data.clients": 0, "visibility.cluster_size": 4}
    world = build_world(resolve({**words, "data.name": "own_data:images"}))
    assert world.lanes[0].population.num_clients == 10
    with mistake_naming("`subjects`"):
        build_world(resolve({**words, "data.name": "own_data:table"}))


def test_the_environment_takes_own_data(here: Path) -> None:
    pytest.importorskip("gymnasium")
    from fedglimpse.env import ClientSelection

    env = ClientSelection({**SMALL, "data.name": "own_data:table", "method": "fedavg-window"})
    env.reset(seed=3)
    _, reward, *_ = env.step(env.action_space.sample())
    assert 0 <= float(reward) <= 1


def test_the_dataset_is_named_by_the_setting_and_its_numbers_are_plain(here: Path) -> None:
    data = sources.load("own_data:table")
    assert data.name == "own_data:table"  # and not digits, whose model would be taken
    assert [str(x.dtype) for x in (data.x_train, data.y_test)] == ["torch.float32", "torch.int64"]
    assert (data.num_classes, type(data.num_classes)) == (4, int)


@pytest.mark.parametrize(("name", "subject"), MISTAKES.items())
def test_every_mistake_is_one_sentence(here: Path, name: str, subject: str) -> None:
    with mistake_naming(subject):
        sources.load(f"own_data:{name}")


def test_data_that_changes_between_calls_is_refused(here: Path) -> None:
    sources.load("own_data:unseeded")
    with mistake_naming("own_data:unseeded"):
        sources.load("own_data:unseeded")


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("own_data:arrays", "ndarray"),
        ("own_data", "own_data"),
        ("nowhere:data", "data.name=nowhere:data"),
    ],
)
def test_the_command_names_it_and_writes_nothing(folder: Path, name: str, subject: str) -> None:
    done = call(folder, "run", f"data.name={name}", "--out", "bad")
    assert (done.returncode, subject in done.stderr) == (2, True), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (folder / "bad").exists()


def test_a_run_is_not_resumed_with_another_policy(here: Path) -> None:
    base = {**SMALL, "method": "glimpse", "checkpoint.every": 1}
    for seed in (0, 1):
        run({**base, "seeds": [seed], "agent.save": f"policy-{seed}.pt"})
    (here / "policy-0.pt").rename(here / "policy.pt")
    stops, keys = iter([False, True]), {**base, "agent.load": "policy.pt"}
    with pytest.raises(Stopped):
        run(keys, "loaded", should_stop=lambda: next(stops))
    (here / "policy-1.pt").rename(here / "policy.pt")
    with mistake("agent.load"):
        run(keys, "loaded", resume=True)


def test_a_run_may_write_the_policy_it_began_with(here: Path) -> None:
    base = {**SMALL, "method": "glimpse", "agent.save": "policy.pt"}
    run(base)
    keys = {**base, "agent.load": "policy.pt"}
    first = run(keys, "again").summary
    assert run(keys, "again", resume=True).summary == first
