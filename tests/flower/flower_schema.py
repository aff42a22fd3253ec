"""What every run folder must hold, whoever wrote it."""

from __future__ import annotations

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
    places = [(r["lane"], r["round"]) for r in records]
    assert sorted(places) == [
        (lane, t) for lane in range(len(config.seeds)) for t in range(config.rounds)
    ]
    for r in records:
        check_record(r, config.seeds[r["lane"]])
    summary = json.loads((path / "summary.json").read_text())
    assert summary["method"] == config.method
    assert summary["rounds"] == config.rounds
    assert summary["seeds"].keys() == {str(s) for s in config.seeds}
    return records


def check_record(r: dict[str, Any], seed: int) -> None:
    assert r["seed"] == seed
    for name in ("visible", "selected", "rejected"):
        assert all(isinstance(i, int) and i >= 0 for i in r[name]), name
        assert len(set(r[name])) == len(r[name]), name
    assert set(r["selected"]) <= set(r["visible"])
    assert set(r["rejected"]) <= set(r["visible"]) - set(r["selected"])
    assert len(r["weights"]) == len(r["selected"])
    assert all(math.isfinite(w) for w in r["weights"])
    for name in NUMBERS:
        assert isinstance(r[name], int | float), name
        assert math.isfinite(r[name]), name
    for name in SCORES:
        assert r[name] is None or math.isfinite(r[name]), name
    assert r["train_loss"] is None or math.isfinite(r["train_loss"])
    assert r["per_class_f1"] is None or all(0 <= f <= 1 for f in r["per_class_f1"])
