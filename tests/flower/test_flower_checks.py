"""Runs that cannot start or continue on devices end in one sentence before anything is sent."""

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


def before_round(monkeypatch: pytest.MonkeyPatch, round_num: int, action: Any) -> None:
    """Call `action` before a round runs, once."""
    run_round = DeviceRound.run
    actions = [action]

    def hooked(self: DeviceRound) -> Any:
        if self.round_num == round_num and actions:
            actions.pop()()
        return run_round(self)

    monkeypatch.setattr(DeviceRound, "run", hooked)


def kill() -> None:
    raise KeyboardInterrupt


def test_two_servers_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r"
    settings = small.config("fedavg", rounds=4)

    def start_second_server() -> None:
        with mistake_naming(str(out)):
            small.serve(small.grid(), settings, out)

    before_round(monkeypatch, 2, start_second_server)
    small.serve(small.grid(), settings, out)
    check_run_folder(out)  # every round once
    assert not list(out.glob("*.lock"))


@pytest.mark.parametrize("name", ["misspelt", "distilled", "without_needs", "list_needs"])
def test_a_method_that_can_run_nowhere_is_refused_like_in_the_simulator(
    name: str, tmp_path: Path
) -> None:
    settings = small.config(f"faulty_methods:{name}")
    grid = small.grid()
    with pytest.raises(UserError) as simulated:
        experiment.run(settings)
    with pytest.raises(UserError) as served:
        small.serve(grid, settings, tmp_path / "r")
    assert str(served.value) == str(simulated.value)
    assert grid.log == []
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("method", ["one_start", "lost", "talking"])
def test_a_method_that_fails_in_a_round_gives_the_simulators_sentence(method: str) -> None:
    settings = small.config(f"faulty_methods:{method}")
    with pytest.raises(UserError) as simulated:
        experiment.run(settings)
    with pytest.raises(UserError) as served:
        small.serve(small.grid(), settings)
    assert str(served.value) == str(simulated.value)


def test_feedback_may_return_none() -> None:
    settings = small.config("faulty_methods:silent")
    records = small.serve(small.grid(), settings).records
    assert [record["round"] for record in records] == [0, 1, 2]


def test_visits_are_counted_where_all_train_before_the_choice() -> None:
    settings = small.config("faulty_methods:blocks")
    simulated = experiment.run(settings)
    served = small.serve(small.grid(), settings)
    for on_devices, in_simulator in zip(served.records, simulated.records, strict=True):
        assert on_devices["selected"] == in_simulator["selected"]
    torch.testing.assert_close(served.state, simulated.world.states[0], rtol=1e-5, atol=1e-6)


def test_a_policy_that_could_not_be_saved_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    grid = small.grid()
    with mistake_naming(f"agent.save={folder}"):
        small.serve(grid, small.config("glimpse", agent__save=str(folder)), tmp_path / "r")
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
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_a_run_of_the_simulator_is_not_continued_on_devices(tmp_path: Path) -> None:
    settings = small.config("fedavg", rounds=2, checkpoint__every=1)
    experiment.run(settings, tmp_path / "r")
    before = contents(tmp_path / "r")
    with mistake("out"):
        small.serve(small.grid(), settings, tmp_path / "r")
    assert contents(tmp_path / "r") == before


def test_a_run_on_devices_is_not_continued_in_the_simulator(tmp_path: Path) -> None:
    settings = small.config("fedavg", rounds=2, checkpoint__every=1)
    out = tmp_path / "r"
    small.serve(small.grid(), settings, out)
    with (out / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2}\n')  # ahead of the checkpoint
    before = contents(out)
    for resume in (True, False):
        with mistake("--out"):
            experiment.run(settings, out, resume=resume)
    assert contents(out) == before
    (out / "clients.json").unlink()  # then its checkpoint shows it
    with mistake_naming("--out"):
        experiment.run(settings, out, resume=True)


def test_a_run_on_devices_is_not_measured(tmp_path: Path) -> None:
    small.serve(small.grid(), small.config("fedavg", rounds=2), tmp_path / "r")
    before = contents(tmp_path / "r")
    with mistake_naming(str(tmp_path / "r")):
        measure_run(tmp_path / "r")
    assert contents(tmp_path / "r") == before


def test_a_run_on_devices_is_recognised_before_its_first_round(tmp_path: Path) -> None:
    settings = small.config("fedavg")
    out = tmp_path / "r"
    with mistake("terms.min_clients"):
        small.serve(FakeGrid([]), settings, out)
    with mistake("--out"):
        experiment.run(settings, out, resume=True)
    assert len(small.serve(small.grid(), settings, out).records) == 3


def test_a_run_is_not_continued_with_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small.config("fedavg")
    out = tmp_path / "r"
    before_round(monkeypatch, 2, kill)
    with pytest.raises(KeyboardInterrupt):
        small.serve(small.grid(), settings, out)
    before = contents(out)

    def other() -> torch.nn.Module:
        return nets.digits_mlp("group")

    server = Server(settings, replace(small.problem(), model=other), small.TERMS, out)
    with mistake("out"):
        server.run(small.grid(app=client_app(other, data=small.data)))
    assert contents(out) == before
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


def test_min_clients_cannot_exceed_the_number_of_clients(tmp_path: Path) -> None:
    terms = ServerTerms(min_clients=99)
    with mistake("terms.min_clients"):
        small.serve(small.grid(), small.config("fedavg"), tmp_path / "r", terms)
    assert not (tmp_path / "r").exists()


def test_a_finished_run_needs_no_clients(tmp_path: Path) -> None:
    settings = small.config("fedavg")
    out = tmp_path / "r"
    first = small.serve(small.grid(), settings, out)
    (out / "summary.json").unlink()
    second = small.serve(FakeGrid([]), settings, out)
    assert second.records == first.records == RunFolder(out).read()
    assert torch.equal(second.state, first.state)
    check_run_folder(out)
