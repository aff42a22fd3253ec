"""What every run folder must hold, of the simulator and of devices."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

from fedglimpse.runs.folder import stored_config

NUMBERS = ("reward", "uplink_bytes", "downlink_bytes", "client_flops", "server_flops", "seconds")
SCORES = ("accuracy", "macro_f1", "loss")


def check_run_folder(path: Path) -> list[dict[str, Any]]:
    """Assert that a finished run folder is complete and consistent; returns its records."""
    config = stored_config(path)
    for name in ("environment.json", "checkpoint.pt", "summary.json"):
        assert (path / name).exists(), name
    records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    lanes = range(len(config.seeds))
    expected = list(itertools.product(lanes, range(config.rounds)))
    assert sorted((record["lane"], record["round"]) for record in records) == expected
    for record in records:
        check_record(record, config.seeds[record["lane"]])
    summary = json.loads((path / "summary.json").read_text())
    assert summary["method"] == config.method
    assert summary["rounds"] == config.rounds
    assert summary["seeds"].keys() == set(map(str, config.seeds))
    return records


def check_record(record: dict[str, Any], seed: int) -> None:
    assert record["seed"] == seed
    for name in ("visible", "selected", "rejected"):
        assert all(isinstance(client, int) and client >= 0 for client in record[name]), name
        assert len(set(record[name])) == len(record[name]), name
    assert set(record["selected"]) <= set(record["visible"])
    assert set(record["rejected"]) <= set(record["visible"]) - set(record["selected"])
    assert len(record["weights"]) == len(record["selected"])
    assert all(math.isfinite(weight) for weight in record["weights"])
    for name in NUMBERS:
        assert isinstance(record[name], int | float), name
        assert math.isfinite(record[name]), name
    for name in SCORES:
        assert record[name] is None or math.isfinite(record[name]), name
    assert record["train_loss"] is None or math.isfinite(record["train_loss"])
    assert record["per_class_f1"] is None or all(
        0 <= score <= 1 for score in record["per_class_f1"]
    )
