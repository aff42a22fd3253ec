"""A user's own method: its mistakes are one sentence, it reads no private data, it may change."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedglimpse import LocalObjective, WeightedDelta
from fedglimpse.cli.main import app
from fedglimpse.env.settings import settings_of
from fedglimpse.env.stepper import LaneStepper
from fedglimpse.errors import UserError
from fedglimpse.methods.base import Setting, UniformRandom, random_slots
from fedglimpse.methods.build import is_oracle
from fedglimpse.runs.experiment import Result, Stopped, run
from fedglimpse.studies.compare import comparison_table
from fedglimpse.studies.report.analysis import analyse
from fedglimpse.studies.results.load import load_study
from fedglimpse.studies.results.stored import write_study
from fedglimpse.studies.sweep.plan import read_plan
from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep
from fedglimpse.types import Choice, Method, Outcome, Update, View
from mistakes import mistake, mistake_naming
from rewriting import rewrite

SMALL = {
    "data.clients": 12, "visibility.cluster_size": 4, "selection.k": 2, "local.epochs": 1,
    "rounds": 2, "checkpoint.every": 1,
}  # fmt: skip
TINY = [f"{key}={value}" for key, value in SMALL.items()]
OWN = f"{__name__}:build"
GIVEN: dict[str, Any] = {}  # what `build` puts together


class Prescribed(UniformRandom):
    """Random selection with prescribed answers."""

    def select(self, view: View, k: int) -> Choice:
        return Choice(random_slots(view, k), info=GIVEN.get("info", {}))

    def feedback(self, outcome: Outcome) -> Any:
        return GIVEN.get("feedback", {})

    def state_dict(self) -> Any:
        return GIVEN.get("state", {})


class Merging(WeightedDelta):
    """FedAvg's aggregation, with an answer that a test may spoil."""

    def step(self, state: torch.Tensor, update: Update) -> Any:
        return GIVEN.get("step", lambda s: s)(super().step(state, update))


class KeepsNothing(WeightedDelta):
    def state_dict(self) -> Any:
        return None


class Weighing(WeightedDelta):
    applied: Any = [0.5, 0.5]  # noqa: RUF012


class Bare:
    needs: frozenset[str] = frozenset()
    starts = step = state_dict = load_state_dict = print


class ReadsLabels(UniformRandom):
    needs = frozenset({"label_histogram"})


class LearnsLabels(UniformRandom):
    learns_from = frozenset({"label_histogram"})


class MergesByLabels(WeightedDelta):
    needs = frozenset({"label_histogram"})


@dataclass(frozen=True)
class Rated:
    rate: float = 1.0


def build(setting: Setting) -> Method:
    method = Method(GIVEN.get("selector", Prescribed()), GIVEN.get("aggregator", Merging()))
    objective = GIVEN.get("objective", method.objective)
    return Method(method.selector, method.aggregator, objective)


@pytest.fixture(autouse=True)
def given() -> dict[str, Any]:
    GIVEN.clear()
    return GIVEN


def play(out: Path | None = None, **keys: Any) -> Result:
    return run({"method": OWN, **SMALL, **keys}, out)


@pytest.mark.parametrize("part", ["feedback", "info"])
@pytest.mark.parametrize(
    ("answer", "recorded"),
    [
        (None, {}),
        ({"x": torch.ones(())}, {"x": 1.0}),
        ({"x": np.float32(0.5), "y": np.int64(3), "z": np.array(2)}, {"x": 0.5, "y": 3, "z": 2}),
        ({"x": [1, 2.5], "y": (torch.zeros(()), 1)}, {"x": [1, 2.5], "y": [0.0, 1]}),
        ({"x": {"inner": np.float32(1)}, "word": "w"}, {"x": {"inner": 1.0}, "word": "w"}),
    ],
)
def test_values_that_json_can_hold_are_recorded(
    part: str, answer: Any, recorded: dict[str, Any], given: dict[str, Any], tmp_path: Path
) -> None:
    given[part] = answer
    done = play(tmp_path / "o")
    lines = (tmp_path / "o" / "rounds.jsonl").read_text().splitlines()
    for record in (*done.records, *map(json.loads, lines)):
        assert {key: record[key] for key in recorded} == recorded


@pytest.mark.parametrize(
    ("wrong", "subject"),
    [
        ({"feedback": 0.5}, "Prescribed.feedback()"),
        ({"info": [1]}, "Choice.info of Prescribed.select()"),
        ({"feedback": {"q": torch.ones(3)}}, "float32 [3] as 'q'"),
        ({"info": {"q": object()}}, "'q'"),
        ({"info": {"q": [1, {2}]}}, "'q'"),
        ({"feedback": {3: 1.0}}, "Prescribed.feedback()"),
        ({"feedback": {"server_flops": "many"}}, "server_flops='many'"),
        ({"step": lambda s: None}, "Merging.step"),
        ({"step": lambda s: s[:5]}, "float32 [5]"),
        ({"step": lambda s: s.tolist()}, "Merging.step"),
        ({"step": lambda s: s * torch.nan}, "Merging.step"),
        ({"aggregator": Weighing()}, "Weighing.applied"),
        ({"aggregator": Bare()}, "applied"),
        ({"selector": Prescribed}, "Prescribed()"),
        ({"aggregator": WeightedDelta}, "WeightedDelta()"),
        ({"objective": "prox"}, "LocalObjective"),
        ({"objective": LocalObjective("big")}, "proximal_mu='big'"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_of_an_author_is_one_sentence(
    wrong: dict[str, Any], subject: str, given: dict[str, Any]
) -> None:
    given |= wrong
    with mistake_naming(subject):
        play()


class Shuffles(UniformRandom):
    def select(self, view: View, k: int) -> Choice:
        view.ids[:] = view.ids.flip(0)
        view.sizes.zero_()
        return Choice(torch.arange(k))


def test_a_method_that_changes_its_view_changes_nothing_else(given: dict[str, Any]) -> None:
    given["selector"] = Shuffles()
    for record in play().records:
        assert record["selected"] == record["visible"][:2]


@pytest.mark.parametrize(
    ("wrong", "subject"),
    [
        ({"state": None}, "Prescribed.state_dict()"),
        ({"aggregator": KeepsNothing()}, "KeepsNothing.state_dict()"),
    ],
)
def test_a_missing_state_is_refused_at_the_first_checkpoint(
    wrong: dict[str, Any], subject: str, given: dict[str, Any], tmp_path: Path
) -> None:
    given |= wrong
    with mistake_naming(subject):
        play(tmp_path / "o")
    assert not (tmp_path / "o" / "checkpoint.pt").exists()


def test_options_that_are_no_dataclass_are_one_sentence(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Options:
        rate = 1.0

    def reading(setting: Setting) -> Method:
        setting.options(Options)
        return Method(Prescribed(), Merging())

    monkeypatch.setattr(sys.modules[__name__], "build", reading)
    with mistake_naming("options(Options)"):
        play()


ORACLES = [
    {"selector": ReadsLabels()},
    {"selector": LearnsLabels()},
    {"aggregator": MergesByLabels()},
]


@pytest.mark.parametrize("private", ORACLES)
def test_private_labels_need_a_permission_and_leave_a_mark(
    private: dict[str, Any], given: dict[str, Any], tmp_path: Path
) -> None:
    given |= private
    with mistake_naming("label_histogram"):
        play()
    with mistake_naming("options.allow_oracle=true"):
        play(**{"options.allow_oracle": False})
    assert is_oracle(OWN)
    done = play(tmp_path / "o", **{"options.allow_oracle": True})
    assert all(record["oracle"] is True for record in done.records)
    assert f"| {OWN} (oracle) " in comparison_table([done])
    assert [row.oracle for row in analyse(load_study(tmp_path / "o")).rows] == [True]


def test_the_permission_for_oracles_is_not_an_option_of_the_method(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []

    def reading(setting: Setting) -> Method:
        rates.append(setting.options(Rated).rate)
        return Method(ReadsLabels(), Merging())

    monkeypatch.setattr(sys.modules[__name__], "build", reading)
    play(**{"options.allow_oracle": True, "options.rate": 0.5})
    assert rates == [0.5]
    with mistake("options.rat"):
        play(**{"options.allow_oracle": True, "options.rat": 0.5})


def test_the_mark_of_an_oracle_cannot_be_removed(given: dict[str, Any]) -> None:
    class Hiding(ReadsLabels):
        def feedback(self, outcome: Outcome) -> Any:
            return {"oracle": False}

    given["selector"] = Hiding()
    with mistake_naming("'oracle'"):
        play(**{"options.allow_oracle": True})


@pytest.mark.parametrize("method", [OWN, "fedavg", "f3ast"])
def test_a_needless_permission_is_refused(method: str) -> None:
    """Reports would mark it as an oracle."""
    with mistake_naming("options.allow_oracle"):
        run({"method": method, "options.allow_oracle": True, **SMALL})
    assert not is_oracle(method)
    assert "oracle" not in play().records[0]


def test_compare_gives_the_permission_to_oracles_only(
    given: dict[str, Any], tmp_path: Path
) -> None:
    given["selector"] = ReadsLabels()
    words = ["compare", OWN, "fedavg", *TINY, "-q", "--out", str(tmp_path / "c")]
    words += ["--workers", "1"]  # another process would not have what the test has given
    done = CliRunner().invoke(app, [*words, "options.allow_oracle=true"])
    assert done.exit_code == 0, done.exception
    assert f"| {OWN} (oracle)" in done.stdout
    assert "(oracle)" not in next(line for line in done.stdout.splitlines() if "fedavg" in line)


def test_an_environment_needs_the_permission_too() -> None:
    reports = ("label_histogram",)
    with mistake_naming("label_histogram"):
        settings_of({"method": "fedavg", **SMALL}, reports)
    allowed = {"method": "fedavg", "options.allow_oracle": True, **SMALL}
    stepper = LaneStepper(settings_of(allowed, reports), 1)
    stepper.restart({0: 0})
    stepper.observe()
    assert stepper.step([torch.tensor([0, 1])])[0].record["oracle"] is True


SOURCE = """import fedglimpse

class {name}(fedglimpse.Stateless):
    def select(self, view, k):
        return fedglimpse.Choice(fedglimpse.random_slots(view, {k}))

def build(setting):
    return fedglimpse.Method({name}(), fedglimpse.WeightedDelta())
"""
NET = """from torch import nn

def own():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
"""


DATA = """import torch
from fedglimpse.data import Dataset

def own():
    x, y = torch.randn(400, 8), torch.arange(400) % 3
    return Dataset("own", "own", x, y, x[:40], y[:40], 3)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write `own_method.py` as a new process would find it."""
    monkeypatch.chdir(tmp_path)

    def writing(text: str = SOURCE.format(name="First", k="k"), module: str = "own_method") -> None:
        (tmp_path / f"{module}.py").write_text(text)
        monkeypatch.delitem(sys.modules, module, raising=False)

    for module in ("own_method", "own_net"):
        writing(module=module)
    return writing


OTHER = SOURCE.format(name="Second", k="1")
MINE = {"method": "own_method:build", **SMALL}


def stopped(config: dict[str, Any], out: Path) -> None:
    with pytest.raises(Stopped):
        run(config, out, should_stop=lambda: True)


def code_in(out: Path, entry: str = "own_code") -> Any:
    return json.loads((out / "environment.json").read_text())[entry]


@pytest.mark.parametrize("finished", [False, True])
def test_resuming_with_other_code_is_refused(
    finished: bool, write: Callable[..., None], tmp_path: Path
) -> None:
    out = tmp_path / "o"
    if finished:
        run(MINE, out)
    else:
        stopped(MINE, out)
    before = (out / "rounds.jsonl").read_bytes()
    write(OTHER)
    with mistake_naming("own_method.py"):
        run(MINE, out, resume=True)
    assert (out / "rounds.jsonl").read_bytes() == before
    write()
    assert len(run(MINE, out, resume=True).records) == 2


@pytest.mark.parametrize("name", ["model.name", "data.name"])
def test_code_of_models_and_data_is_checked_too(
    name: str, write: Callable[..., None], tmp_path: Path
) -> None:
    text = NET if name == "model.name" else DATA
    write(text, "own_net")
    config = {"method": "fedavg", name: "own_net:own", **SMALL}
    stopped(config, tmp_path / "o")
    write(text + "# to do\n", "own_net")
    with mistake_naming("own_net.py"):
        run(config, tmp_path / "o", resume=True)


def test_the_imported_code_counts_not_the_present_file(
    write: Callable[..., None], tmp_path: Path
) -> None:
    stopped(MINE, tmp_path / "o")
    (tmp_path / "own_method.py").write_text(OTHER)  # the process still has the first
    run(MINE, tmp_path / "o", resume=True)
    write()
    run(MINE, tmp_path / "again")
    assert code_in(tmp_path / "o") == code_in(tmp_path / "again")


def test_a_run_without_a_checkpoint_starts_over(write: Callable[..., None], tmp_path: Path) -> None:
    """Such as one that was killed before its first checkpoint."""
    stopped(MINE, tmp_path / "o")
    (tmp_path / "o" / "checkpoint.pt").unlink()
    before = code_in(tmp_path / "o")
    write(OTHER)
    assert len(run(MINE, tmp_path / "o", resume=True).records) == 2
    assert code_in(tmp_path / "o") != before


@pytest.mark.parametrize(
    "fault", ["k // (1 - view.round_num)", "k + 9 * view.round_num", "[k, 'x'][view.round_num]"]
)
def test_code_that_failed_may_be_fixed(
    fault: str, write: Callable[..., None], tmp_path: Path
) -> None:
    write(SOURCE.format(name="First", k=fault))
    with pytest.raises((ZeroDivisionError, TypeError, UserError)):  # the last fails in ours
        run(MINE, tmp_path / "o")
    failed = code_in(tmp_path / "o", "own_code_that_failed")
    write(OTHER)
    assert len(run(MINE, tmp_path / "o", resume=True).records) == 2
    assert code_in(tmp_path / "o") != failed
    assert code_in(tmp_path / "o", "own_code_that_failed") == failed
    write()
    with mistake_naming("own_method.py"):
        run(MINE, tmp_path / "o", resume=True)


def test_folders_without_hashes_of_code_are_accepted(
    write: Callable[..., None], tmp_path: Path
) -> None:
    stopped(MINE, tmp_path / "o")
    file = tmp_path / "o" / "environment.json"
    there = json.loads(file.read_text())
    assert len(there.pop("own_code")["own_method"]) == 64
    rewrite(file, json.dumps(there))
    write(OTHER)
    assert len(run(MINE, tmp_path / "o", resume=True).records) == 2


def test_compare_refuses_to_resume_with_other_code(
    write: Callable[..., None], tmp_path: Path
) -> None:
    words = ["own_method:build", "fedavg", *TINY, "--out", str(tmp_path / "o"), "-q"]
    assert CliRunner().invoke(app, ["compare", *words]).exit_code == 0
    write(OTHER)
    done = CliRunner().invoke(app, ["compare", *words, "--resume"])
    assert "own_method.py" in str(done.exception)


SWEEP = """title = "Own"
methods = ["fedavg", "own_method:build"]
[base]
seeds = [0]
rounds = 2
local.epochs = 1
[[settings]]
name = "digits"
data.clients = 12
visibility.cluster_size = 4
selection.k = 2
"""
QUIET = SweepOptions(quiet=True)


def test_a_sweep_with_other_code_is_refused(write: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SWEEP)
    plan, out = read_plan(tmp_path / "s.toml"), tmp_path / "o"
    assert run_sweep(plan, out, QUIET).done == 2
    write(OTHER)
    with mistake_naming("own_method.py"):
        run_sweep(plan, out, QUIET)
    write()
    assert run_sweep(plan, out, QUIET).done == 2


def test_results_of_other_code_are_not_reused(write: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SWEEP)
    plan, old = read_plan(tmp_path / "s.toml"), tmp_path / "old"
    run_sweep(plan, old, QUIET)
    stored = tmp_path / "study.json.gz"
    write_study(load_study(old), stored)
    same = run_sweep(plan, tmp_path / "same", SweepOptions(reuse=[old], quiet=True))
    assert (same.reused, same.done) == (2, 2)
    write(OTHER)
    new = run_sweep(plan, tmp_path / "new", SweepOptions(reuse=[old], quiet=True))
    assert (new.reused, new.done) == (1, 2)
    for source in (old, stored):
        left = run_sweep(
            plan, tmp_path / f"less {source.name}", SweepOptions(without=[source], quiet=True)
        )
        assert (left.left_out, left.done) == (1, 1)
