"""Runs that cannot be on devices, or cannot go on, end in one sentence before anything is done."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

import small_federation as small
from fake_grid import FakeGrid
from flwr.app import ArrayRecord
from run_folder_schema import check_run_folder

from fedglimpse.config.loading import resolve
from fedglimpse.errors import UserError
from fedglimpse.federation import models as nets
from fedglimpse.flower.client import client_app
from fedglimpse.flower.deployment import ServerTerms
from fedglimpse.flower.round import DeviceRound
from fedglimpse.flower.server import Server
from fedglimpse.flower.strategy import GlimpseStrategy, from_run_config
from fedglimpse.runs import experiment
from fedglimpse.runs.folder import RunFolder
from fedglimpse.theory.panel import measure_run
from mistakes import mistake, mistake_naming


def before(monkeypatch: pytest.MonkeyPatch, number: int, deed: Any) -> None:
    """Do something before a round is played, once."""
    play, todo = DeviceRound.run, [deed]

    def hooked(self: DeviceRound) -> Any:
        if self.round_num == number and todo:
            todo.pop()()
        return play(self)

    monkeypatch.setattr(DeviceRound, "run", hooked)


def kill() -> None:
    raise KeyboardInterrupt


def test_two_servers_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, settings = tmp_path / "r", small.config("fedavg", rounds=4)

    def second() -> None:
        with mistake_naming(str(out)):
            small.serve(small.grid(), settings, out)

    before(monkeypatch, 2, second)
    small.serve(small.grid(), settings, out)
    check_run_folder(out)  # every round once
    assert not list(out.glob("*.lock"))


@pytest.mark.parametrize("name", ["misspelt", "distilled", "without_needs", "list_needs"])
def test_a_method_that_can_run_nowhere_is_refused_like_in_the_simulator(
    name: str, tmp_path: Path
) -> None:
    settings, grid = small.config(f"faulty_methods:{name}"), small.grid()
    with pytest.raises(UserError) as simulated:
        experiment.run(settings)
    with pytest.raises(UserError) as served:
        small.serve(grid, settings, tmp_path / "r")
    assert str(served.value) == str(simulated.value)
    assert grid.log == []
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("method", ["one_start", "lost", "talking"])
def test_what_a_method_cannot_answer_is_the_simulators_sentence(method: str) -> None:
    settings = small.config(f"faulty_methods:{method}")
    with pytest.raises(UserError) as simulated:
        experiment.run(settings)
    with pytest.raises(UserError) as served:
        small.serve(small.grid(), settings)
    assert str(served.value) == str(simulated.value)


def test_feedback_that_says_nothing_is_nothing() -> None:
    settings = small.config("faulty_methods:silent")
    assert [r["round"] for r in small.serve(small.grid(), settings).records] == [0, 1, 2]


def test_visits_count_on_where_all_train_before_the_choice() -> None:
    settings = small.config("faulty_methods:blocks")
    simulated, served = experiment.run(settings), small.serve(small.grid(), settings)
    assert [r["selected"] for r in served.records] == [r["selected"] for r in simulated.records]
    torch.testing.assert_close(served.state, simulated.world.states[0], rtol=1e-5, atol=1e-6)


def test_a_policy_is_not_learnt_in_vain(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    grid, place = small.grid(), str(tmp_path / "there")
    with mistake_naming(f"agent.save={place}"):
        small.serve(grid, small.config("glimpse", agent__save=place), tmp_path / "r")
    assert grid.log == []
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log__tensorboard", True),
        ("log__own", "my.module:sink"),
        ("checkpoint__keep_models", 2),
    ],
)
def test_what_only_the_simulator_does_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with mistake(key.replace("__", ".")):
        small.serve(small.grid(), small.config("fedavg", **{key: value}), tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("options", [{}, {"options.allow_oracle": True}])
def test_an_oracle_is_refused_even_where_it_is_allowed(
    options: dict[str, bool], tmp_path: Path
) -> None:
    settings = resolve({"method": "oracle-balance", "visibility.kind": "full", **options})
    with mistake("method"):
        small.serve(FakeGrid([]), settings, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def contents(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def test_a_run_of_the_simulator_is_not_continued_on_devices(tmp_path: Path) -> None:
    settings = small.config("fedavg", rounds=2, checkpoint__every=1)
    experiment.run(settings, tmp_path / "r")
    there = contents(tmp_path / "r")
    with mistake("out"):
        small.serve(small.grid(), settings, tmp_path / "r")
    assert contents(tmp_path / "r") == there


def test_a_run_on_devices_is_not_continued_in_the_simulator(tmp_path: Path) -> None:
    settings, out = small.config("fedavg", rounds=2, checkpoint__every=1), tmp_path / "r"
    small.serve(small.grid(), settings, out)
    with (out / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2}\n')  # ahead of the checkpoint
    there = contents(out)
    for resume in (True, False):
        with mistake("--out"):
            experiment.run(settings, out, resume=resume)
    assert contents(out) == there
    (out / "clients.json").unlink()  # then its checkpoint tells
    with mistake_naming("--out"):
        experiment.run(settings, out, resume=True)


def test_a_run_on_devices_is_not_measured(tmp_path: Path) -> None:
    small.serve(small.grid(), small.config("fedavg", rounds=2), tmp_path / "r")
    there = contents(tmp_path / "r")
    with mistake_naming(str(tmp_path / "r")):
        measure_run(tmp_path / "r")
    assert contents(tmp_path / "r") == there


def test_a_run_on_devices_is_known_as_one_before_its_first_round(tmp_path: Path) -> None:
    settings, out = small.config("fedavg"), tmp_path / "r"
    with mistake("terms.min_clients"):
        small.serve(FakeGrid([]), settings, out)
    with mistake("--out"):
        experiment.run(settings, out, resume=True)
    assert len(small.serve(small.grid(), settings, out).records) == 3


def test_a_run_is_not_continued_with_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, out = small.config("fedavg"), tmp_path / "r"
    before(monkeypatch, 2, kill)
    with pytest.raises(KeyboardInterrupt):
        small.serve(small.grid(), settings, out)
    there = contents(out)

    def other() -> torch.nn.Module:
        return nets.digits_mlp("group")

    server = Server(settings, replace(small.problem(), model=other), small.TERMS, out)
    with mistake("out"):
        server.run(small.grid(app=client_app(other, data=small.data)))
    assert contents(out) == there
    assert len(small.serve(small.grid(), settings, out).records) == 3


def test_the_initial_model_must_fit(tmp_path: Path) -> None:
    other = ArrayRecord(nets.digits_mlp("group").state_dict())
    strategy = GlimpseStrategy(small.config("fedavg"), small.problem(), small.TERMS, tmp_path / "r")
    with mistake():
        strategy.start(small.grid(), other)
    server = Server(small.config("fedavg"), small.problem(), small.TERMS, tmp_path / "r")
    with mistake():
        server.run(small.grid(), torch.zeros(3))
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("terms.quorum", "0.5"),
        ("terms.quorum", 2.0),
        ("terms.train_timeout", "600"),
        ("terms.train_timeout", float("nan")),
        ("terms.train_timeout", 0.0),
        ("terms.patience", True),
        ("terms.patience", 0.5),
        ("terms.min_clients", 2.5),
        ("terms.min_clients", -1),
        ("terms.visible_timeout", -5.0),
        ("terms.qorum", 0.25),
        ("seed", "x"),
        ("seed", 1.5),
    ],
)
def test_terms_and_seed_are_checked(key: str, value: Any) -> None:
    with mistake(key):
        from_run_config({key: value})


def test_no_more_clients_are_awaited_than_there_may_be(tmp_path: Path) -> None:
    terms = ServerTerms(min_clients=99)
    with mistake("terms.min_clients"):
        small.serve(small.grid(), small.config("fedavg"), tmp_path / "r", terms)
    assert not (tmp_path / "r").exists()


def test_a_finished_run_needs_nobody(tmp_path: Path) -> None:
    settings, out = small.config("fedavg"), tmp_path / "r"
    first = small.serve(small.grid(), settings, out)
    (out / "summary.json").unlink()
    again = small.serve(FakeGrid([]), settings, out)
    assert again.records == first.records == RunFolder(out).read()
    assert torch.equal(again.state, first.state)
    check_run_folder(out)
