"""Live logs: the same numbers as the records, in every tool, also after a stop."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedglimpse.config.loading import resolve
from fedglimpse.errors import UserError
from fedglimpse.runs import experiment
from fedglimpse.runs.experiment import Stopped, run
from fedglimpse.runs.trackers import LiveLog, Source, numbers

SMALL: dict[str, Any] = {"method": "fedavg", "rounds": 5, "seeds": [3, 4], "checkpoint.every": 2}


def test_only_finite_numbers_are_passed_on() -> None:
    record = {
        "lane": 0, "seed": 3, "round": 7, "accuracy": 0.5, "loss": math.nan, "oracle": True,
        "behaviour": "greedy", "q": [1.0], "reward": None, "uplink_bytes": 12,
    }  # fmt: skip
    assert numbers(record) == {"accuracy": 0.5, "uplink_bytes": 12.0}


class Notebook:
    """A sink of our own, which writes down what it is told."""

    pages: list[Any] = []  # noqa: RUF012

    def __init__(self, source: Source) -> None:
        self.seed = source.seed
        self.pages.append(("open", source.seed, source.done))

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        self.pages.append((self.seed, round_num, metrics["accuracy"]))

    def close(self, finished: bool) -> None:
        self.pages.append(("close", self.seed, finished))


class Broken(Notebook):
    """Breaks in round 1."""

    def write(self, round_num: int, metrics: Mapping[str, float]) -> None:
        if round_num == 1:
            raise ConnectionError("nobody listens")
        super().write(round_num, metrics)


@pytest.fixture(autouse=True)
def _empty() -> None:
    Notebook.pages.clear()


def test_a_sink_of_ones_own_sees_every_round_of_every_seed(tmp_path: Path) -> None:
    result = run({**SMALL, "log.own": "test_live:Notebook"}, tmp_path / "o")
    told = [page for page in Notebook.pages if page[0] in (3, 4)]
    assert sorted(told) == sorted((r["seed"], r["round"], r["accuracy"]) for r in result.records)
    assert Notebook.pages[:2] == [("open", 3, 0), ("open", 4, 0)]
    assert Notebook.pages[-2:] == [("close", 3, True), ("close", 4, True)]


def test_a_stopped_run_says_so_and_goes_on(tmp_path: Path) -> None:
    config = {**SMALL, "log.own": "test_live:Notebook"}
    stop_after(3, config, tmp_path / "o")
    assert Notebook.pages[-1] == ("close", 4, False)
    Notebook.pages.clear()
    run(config, tmp_path / "o", resume=True)
    assert Notebook.pages[0] == ("open", 3, 3)
    assert [page[1] for page in Notebook.pages if page[0] == 4] == [3, 4]


def test_a_tool_that_breaks_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run({**SMALL, "log.own": "test_live:Broken"}, tmp_path / "o")
    assert len(result.records) == 10
    assert capsys.readouterr().err.count("Broken is left out: nobody listens") == 2
    assert [page[1] for page in Notebook.pages if page[0] == 3] == [0]


def test_logging_changes_no_result_and_may_change_on_resume(tmp_path: Path) -> None:
    plain = run(SMALL)
    stop_after(2, SMALL, tmp_path / "o")
    logged = run({**SMALL, "log.own": "test_live:Notebook"}, tmp_path / "o", resume=True)
    assert timeless(logged.records) == timeless(plain.records)


def test_a_missing_tool_is_one_sentence_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"log\.wandb=mine needs the package wandb"):
        LiveLog(resolve({"log.wandb": "mine"}), tmp_path)
    with pytest.raises(UserError, match=r"log\.tensorboard=True needs"):
        run({**SMALL, "log.tensorboard": True}, tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_event_files_need_a_folder() -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    with pytest.raises(UserError, match="--out"):
        run({**SMALL, "log.tensorboard": True})


def test_tensorboard_event_files_hold_the_records(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {**SMALL, "log.tensorboard": True}
    stop_after(3, config, tmp_path / "o")
    result = run(config, tmp_path / "o", resume=True)
    for seed in (3, 4):
        events = EventAccumulator(str(tmp_path / "o" / "tensorboard" / f"seed-{seed}"))
        events.Reload()
        mine = [r for r in result.records if r["seed"] == seed]
        for name in ("accuracy", "train_loss", "uplink_bytes", "server_flops"):
            points = [(e.step, e.value) for e in events.Scalars(name)]
            assert points == [(r["round"], pytest.approx(r[name])) for r in mine]


def records_of(file: Path) -> list[Any]:
    """Return what an offline run of W&B holds, once its service has written the end of it."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    for _ in range(100):
        store, found = DataStore(), []
        store.open_for_scan(str(file))
        while data := store.scan_data():
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(record)
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.1)
    pytest.fail(f"{file} has no end after 10 seconds")


def test_wandb_offline_holds_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    result = run({**SMALL, "log.wandb": "digits"}, tmp_path / "o")
    curves = {}
    for file in (tmp_path / "o").glob("wandb/offline-run-*/run-*.wandb"):
        points, project, seed = [], "", None
        for record in records_of(file):
            if record.WhichOneof("record_type") == "run":
                project = record.run.project
                config = {u.key: json.loads(u.value_json) for u in record.run.config.update}
                seed = config.get("seed", seed)
            if record.WhichOneof("record_type") == "history":
                items = {
                    (i.key or "/".join(i.nested_key)): json.loads(i.value_json)
                    for i in record.history.item
                }
                points.append((items["_step"], items["accuracy"]))
        assert project == "digits"
        curves[seed] = points
    assert curves == {
        seed: [(r["round"], r["accuracy"]) for r in result.records if r["seed"] == seed]
        for seed in (3, 4)
    }


def test_mlflow_on_disk_holds_the_records_also_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for it
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    config = {**SMALL, "log.mlflow": "digits"}
    stop_after(2, config, tmp_path / "o")
    client = MlflowClient()
    experiment_id = client.get_experiment_by_name("digits").experiment_id
    assert {r.info.status for r in client.search_runs([experiment_id])} == {"KILLED"}
    result = run(config, tmp_path / "o", resume=True)
    found = client.search_runs([experiment_id])
    assert {(r.data.params["seed"], r.info.status) for r in found} == {
        ("3", "FINISHED"), ("4", "FINISHED"),
    }  # fmt: skip
    for each in found:
        mine = [r for r in result.records if str(r["seed"]) == each.data.params["seed"]]
        history = client.get_metric_history(each.info.run_id, "accuracy")
        points = {point.step: point.value for point in history}
        assert points == {r["round"]: r["accuracy"] for r in mine}
        assert each.data.params["method"] == "fedavg"


def stop_after(rounds: int, config: Mapping[str, Any], out: Path) -> None:
    played = 0

    def enough() -> bool:
        nonlocal played
        played += 1
        return played == rounds

    with pytest.raises(Stopped):
        experiment.run(config, out, should_stop=enough)


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**r, "seconds": 0} for r in records]
