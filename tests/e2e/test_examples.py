"""The programs in `examples/` run."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fedglimpse import run
from fedglimpse.runs.experiment import Stopped

EXAMPLES = Path(__file__).parents[2] / "examples"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quickstart_runs() -> None:
    scores = loaded("quickstart").main(rounds=3)
    assert len(scores) == 3
    assert all(0 < s <= 1 for s in scores.values())


def test_my_method_runs_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    assert loaded("my_method").quickest().shape == (5,)


TRACKED: dict[str, Any] = {"rounds": 4, "seeds": [3, 4], "checkpoint.every": 2}


def stopped_and_resumed(settings: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Return the records of a run that is stopped after two rounds and then resumed."""
    stops = iter([False, True])
    with pytest.raises(Stopped):
        run(settings, out, should_stop=lambda: next(stops))
    return run(settings, out, resume=True).records


def accuracies(records: list[dict[str, Any]], seed: int) -> dict[int, float]:
    return {r["round"]: r["accuracy"] for r in records if r["seed"] == seed}


def wandb_records(file: Path) -> list[Any]:
    """Return what an offline run of W&B holds, once its service has written the end of it."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    for _ in range(100):
        store = DataStore()
        store.open_for_scan(str(file))
        records = []
        while data := store.scan_data():
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            records.append(record)
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        time.sleep(0.1)
    pytest.fail(f"{file} has no end after 10 seconds")


def test_wandb_gets_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    records = run({**TRACKED, "log.own": "log_to_wandb:WandbSink"}, tmp_path / "o").records
    curves: dict[int, dict[int, float]] = {}
    for file in (tmp_path / "o").glob("wandb/offline-run-*/run-*.wandb"):
        curve: dict[int, float] = {}
        seed = -1
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "run":
                config = {u.key: json.loads(u.value_json) for u in record.run.config.update}
                seed = config.get("seed", seed)
            if record.WhichOneof("record_type") == "history":
                items = {}
                for item in record.history.item:
                    items[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
                curve[items["_step"]] = items["accuracy"]
        curves[seed] = curve
    assert curves == {seed: accuracies(records, seed) for seed in (3, 4)}


def test_mlflow_gets_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    from mlflow.tracking import MlflowClient

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions require it
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    settings = {**TRACKED, "log.own": "log_to_mlflow:MlflowSink"}
    records = stopped_and_resumed(settings, tmp_path / "o")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("fedglimpse")
    tracked_runs = client.search_runs([experiment.experiment_id])
    assert {(r.data.params["seed"], r.info.status) for r in tracked_runs} == {
        ("3", "FINISHED"),
        ("4", "FINISHED"),
    }
    for tracked in tracked_runs:
        history = client.get_metric_history(tracked.info.run_id, "accuracy")
        curve = {point.step: point.value for point in history}
        assert curve == accuracies(records, int(tracked.data.params["seed"]))
        assert tracked.data.params["method"] == "fedavg"
