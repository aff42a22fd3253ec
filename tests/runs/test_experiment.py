"""Whole runs in memory and on disk: reproducible, resumable, the same in company."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedglimpse
from fedglimpse.config.loading import resolve
from fedglimpse.runs import build
from fedglimpse.runs.build import WorldSetup, build_world, together_key, world_of
from fedglimpse.runs.experiment import Stopped, run, run_together
from fedglimpse.runs.folder import RunFolder
from fedglimpse.runs.rounds import restore, run_round, snapshot
from fedglimpse.simulation.trainers.batched import BatchedTrainer
from fedglimpse.simulation.trainers.jobs import TrainingJobs, TrainingResults
from mistakes import mistake

SMALL = {"rounds": 4, "data.clients": 12, "visibility.cluster_size": 4, "selection.k": 2}


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records]


def test_the_same_seed_gives_the_same_records() -> None:
    first, second = (run({**SMALL, "method": "fedavg-window"}) for _ in range(2))
    assert untimed(first.records) == untimed(second.records)
    other = run({**SMALL, "method": "fedavg-window", "seeds": [1]})
    assert untimed(other.records) != untimed(first.records)


@pytest.mark.parametrize("trainer", ["serial", "batched"])
def test_images_scaled_once_give_the_records_of_images_scaled_in_every_batch(
    trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SMALL, "method": "glimpse", "data.name": "digits", "engine.trainer": trainer}
    scaled_once = run(settings)
    assert scaled_once.world.dataset.x_train.is_floating_point()
    monkeypatch.setattr(build, "SMALL_DATASET", 0)
    scaled_later = run(settings)
    assert scaled_later.world.dataset.x_train.dtype == torch.uint8
    assert untimed(scaled_once.records) == untimed(scaled_later.records)


def test_lanes_together_equal_lanes_alone() -> None:
    settings = {**SMALL, "engine.trainer": "serial"}
    together = untimed(run({**settings, "seeds": [5, 6]}).records)
    for lane, seed in enumerate((5, 6)):
        alone = untimed(run({**settings, "seeds": [seed]}).records)
        beside = [{**r, "lane": 0} for r in together if r["lane"] == lane]
        assert alone == beside


@pytest.mark.parametrize("trainer", ["serial", "batched"])
def test_worlds_on_the_same_parts_do_not_meet(trainer: str) -> None:
    """They take turns with one trainer and one sketch."""
    config = resolve({**SMALL, "method": "glimpse", "engine.trainer": trainer})
    setup = WorldSetup.of(config)
    worlds = [world_of(setup, [replace(config, seeds=(seed,))]) for seed in (5, 6)]
    assert worlds[0].trainer is worlds[1].trainer
    turns = [[run_round(world, True)[0] for world in worlds] for _ in range(3)]
    for lane, seed in enumerate((5, 6)):
        alone = build_world(replace(config, seeds=(seed,)))
        expected = [run_round(alone, True)[0] for _ in range(3)]
        assert untimed([turn[lane] for turn in turns]) == untimed(expected)


def test_batched_lanes_equal_serial_lanes() -> None:
    """After one round: later, units that BatchNorm finds almost dead amplify rounding."""
    for kind in ("label_skew", "dirichlet"):
        unequal = {"data.partition": kind, "data.equal_size": False, "data.min_size": 2}
        settings = {**SMALL, **unequal, "seeds": [0, 6], "rounds": 1}
        serial = run({**settings, "engine.trainer": "serial"})
        batched = run({**settings, "engine.trainer": "batched"})
        torch.testing.assert_close(serial.world.states, batched.world.states, rtol=1e-4, atol=1e-5)


def test_stopping_and_resuming_gives_the_same_records(tmp_path: Path) -> None:
    settings = {**SMALL, "method": "fedavg-window", "seeds": [0, 1], "checkpoint.every": 3}
    whole = run(settings)
    calls = iter([False, True])
    with pytest.raises(Stopped):
        run(settings, tmp_path / "r", should_stop=lambda: next(calls))
    resumed = run(settings, tmp_path / "r", resume=True)
    assert untimed(resumed.records) == untimed(whole.records)
    assert torch.equal(resumed.world.states, whole.world.states)
    resumed_later = run(
        settings, tmp_path / "r", resume=True
    )  # finished: nothing is computed twice
    assert untimed(resumed_later.records) == untimed(whole.records)


def test_a_snapshot_restores_the_world_exactly() -> None:
    config = resolve({**SMALL, "method": "fedavg-window"})
    world = build_world(config)
    run_round(world, on_test=False)
    saved = snapshot(world)
    snapshot_before = copy.deepcopy(saved)
    expected = [run_round(world, on_test=True) for _ in range(2)]
    assert torch.equal(saved["lanes"][0]["state"], snapshot_before["lanes"][0]["state"])
    other = build_world(config)
    restore(other, saved)
    assert [untimed(run_round(other, on_test=True)) for _ in range(2)] == list(
        map(untimed, expected)
    )


TOGETHER = [
    {**SMALL, "method": "fedavg", "rounds": 3, "seeds": [0, 1]},
    {**SMALL, "method": "glimpse", "rounds": 5, "seeds": [0], "agent.learn_start": 2},
    {**SMALL, "method": "fedavg-window", "visibility.kind": "random", "visibility.p": 0.3},
    {
        **SMALL,
        "method": "oort",
        "visibility.kind": "unequal",
        "visibility.rates_by": "label",
        "seeds": [0, 1],
    },
    {
        **SMALL,
        "method": "glimpse",
        "rounds": 6,
        "visibility.kind": "churn",
        "visibility.present": 4,
        "visibility.lifetime": 3,
        "visibility.p": 0.6,
    },
]


def test_runs_together_equal_runs_alone(tmp_path: Path) -> None:
    configs = [resolve({**c, "engine.trainer": "serial"}) for c in TOGETHER]
    assert len({together_key(c) for c in configs}) == 1
    together = run_together([(c, tmp_path / str(i)) for i, c in enumerate(configs)])
    for i, (config, result) in enumerate(zip(configs, together, strict=True)):
        alone = run(config)
        assert untimed(result.records) == untimed(alone.records)
        assert untimed(RunFolder(tmp_path / str(i)).read()) == untimed(alone.records)
        assert result.summary["final_accuracy"] == alone.summary["final_accuracy"]


def test_runs_together_resume_from_different_rounds(tmp_path: Path) -> None:
    configs = [resolve({**c, "engine.trainer": "serial"}) for c in TOGETHER]
    for i in (1, 3, 4):
        calls = iter([False, True])
        with pytest.raises(Stopped):
            run(configs[i], tmp_path / str(i), should_stop=calls.__next__)
    runs = [(c, tmp_path / str(i)) for i, c in enumerate(configs)]
    together = run_together(runs, resume=True)
    for config, result in zip(configs, together, strict=True):
        assert untimed(result.records) == untimed(run(config).records)


def test_runs_with_different_recipes_are_kept_apart() -> None:
    with mistake("local.lr"):
        build_world([resolve(SMALL), resolve({**SMALL, "local.lr": 0.5})])


def test_every_training_has_its_own_randomness() -> None:
    world = build_world(resolve({**SMALL, "seeds": [0, 1]}))
    train, keys = world.trainer.train, []

    class Recorder:
        def train(self, start: torch.Tensor, jobs: Any) -> Any:
            keys.extend(jobs.keys.tolist())
            return train(start, jobs)

    world.trainer = Recorder()
    for _ in range(3):
        run_round(world, on_test=False)
    assert len(set(keys)) == len(keys) == 3 * 2 * 2  # rounds, lanes, chosen clients


def test_no_global_randomness_is_used_or_changed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = run(SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert untimed(run(SMALL).records) == untimed(first.records)


def test_records_hold_what_they_promise() -> None:
    result = run({**SMALL, "seeds": [0, 1], "evaluate.every": 3})
    assert len(result.records) == 8
    for record in result.records:
        assert set(record["selected"]) <= set(record["visible"])
        assert len(set(record["selected"])) == len(record["selected"]) == 2
        assert abs(sum(record["weights"]) - 1) < 1e-6
        scored = record["round"] in (2, 3)  # every third round, and the last
        assert (record["accuracy"] is not None) == scored
        assert 0 <= record["reward"] <= 1
    assert result.summary["final_over_rounds"] == 1


@pytest.mark.parametrize("method", ["fedawac", "feddrl", "fedppo", "palit"])
def test_records_show_the_weights_that_were_used(method: str) -> None:
    """Clients are of one size here, so the choice itself would say one half for each."""
    result = run({**SMALL, "method": method, "rounds": 6})
    used = [record["weights"] for record in result.records]
    assert all(len(w) == 2 and min(w) >= 0 for w in used)
    assert any(abs(w[0] - w[1]) > 1e-4 for w in used)


def test_random_availability_with_one_visible_client() -> None:
    sparse = {"visibility.kind": "random", "visibility.p": 0.02, "rounds": 12, "data.clients": 30}
    result = run({**sparse, "selection.k": 3})
    seen = [len(r["visible"]) for r in result.records]
    assert min(seen) == 1
    assert all(len(r["selected"]) == min(3, n) for r, n in zip(result.records, seen, strict=True))
    idle = run({**sparse, "selection.k": 3, "visibility.min_visible": 2})
    for record in idle.records:
        assert (len(record["selected"]) == 0) == (len(record["visible"]) < 2)
        assert (record["uplink_bytes"] == 0) == (len(record["visible"]) < 2)


def test_fedprox_pulls_clients_towards_the_global_model() -> None:
    far = run({**SMALL, "method": "fedprox", "local.proximal_mu": 0.0, "rounds": 1})
    near = run({**SMALL, "method": "fedprox", "local.proximal_mu": 10.0, "rounds": 1})
    plain = run({**SMALL, "method": "fedavg", "rounds": 1})
    world = build_world(resolve({**SMALL}))
    params = slice(world.reporter.num_params)
    moved = [(r.world.states - world.states)[0, params].norm() for r in (near, plain)]
    assert torch.equal(far.world.states, plain.world.states)
    assert moved[0] < 0.8 * moved[1]


@pytest.mark.parametrize("data", ["digits", "synthetic"])
def test_training_learns(data: str) -> None:
    result = run({"data.name": data, "data.partition": "iid", "rounds": 8})
    assert result.records[-1]["accuracy"] > 0.5  # chance is 0.1


def test_the_public_names_exist() -> None:
    assert {"run", "load", "Stopped", "Update", "Dataset"} <= set(dir(fedglimpse))
    for name in fedglimpse.__all__:
        assert getattr(fedglimpse, name) is not None


@pytest.mark.parametrize("method", ["glimpse", "f3ast", "fedawac"])
def test_learning_in_the_next_round_gives_the_same_records(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: selectors learn and records are written while the next clients train."""
    keys = {**SMALL, "method": method, "rounds": 9, "seeds": [0, 1], "agent.learn_start": 3}
    keys |= {"agent.n_step": 1, "checkpoint.every": 4, "checkpoint.keep_models": 3}
    at_once = run(keys, tmp_path / "at-once")
    monkeypatch.setattr("fedglimpse.runs.experiment.trains_in_background", lambda world: True)
    later = run(keys, tmp_path / "later")
    rounds_done: list[int] = []
    assert untimed(later.records) == untimed(at_once.records)
    assert untimed(RunFolder(tmp_path / "later").read()) == untimed(at_once.records)
    assert torch.equal(later.world.states, at_once.world.states)
    model_files = [
        sorted(p.name for p in (tmp_path / name / "models").iterdir())
        for name in ("at-once", "later")
    ]
    assert model_files[0] == model_files[1]

    def after_six() -> bool:
        rounds_done.append(1)
        return len(rounds_done) == 6

    with pytest.raises(Stopped):
        run(keys, tmp_path / "stopped", should_stop=after_six)
    assert len(RunFolder(tmp_path / "stopped").read()) == 12
    resumed_later = run(keys, tmp_path / "stopped", resume=True)
    assert untimed(resumed_later.records) == untimed(at_once.records)


@pytest.mark.parametrize("method", ["glimpse", "fedavg-window"])
@pytest.mark.parametrize("later", [False, True])
def test_seconds_hold_the_training_and_no_time_twice(
    method: str, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether clients train before the choice or after it, and whenever selectors learn."""
    monkeypatch.setattr("fedglimpse.runs.experiment.trains_in_background", lambda world: later)
    spent: list[float] = []
    train = BatchedTrainer.train

    def timed(self: BatchedTrainer, start: torch.Tensor, jobs: TrainingJobs) -> TrainingResults:
        began = time.perf_counter()
        trained = train(self, start, jobs)
        time.sleep(0.02)
        spent.append(time.perf_counter() - began)
        return trained

    monkeypatch.setattr(BatchedTrainer, "train", timed)
    began = time.perf_counter()
    records = run({**SMALL, "method": method, "engine.trainer": "batched"}).records
    whole = time.perf_counter() - began
    assert sum(spent) <= sum(r["seconds"] for r in records) <= whole
