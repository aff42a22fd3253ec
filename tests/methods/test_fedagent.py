from __future__ import annotations

from typing import Any

import fakes
from fedglimpse.runs.experiment import run

KEYS: dict[str, Any] = {
    "data.clients": 12,
    "visibility.cluster_size": 5,
    "selection.k": 2,
    "local.epochs": 1,
    "rounds": 4,
    "options.hidden": 32,
}


def records(**keys: Any) -> list[dict[str, Any]]:
    rows = run({**KEYS, **{k.replace("__", "."): v for k, v in keys.items()}}).records
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_without_distillation_it_is_favor() -> None:
    favor = records(method="favor")
    assert records(method="fedagent", options__distill=0.0) == favor
    assert records(method="fedagent")[-1]["accuracy"] != favor[-1]["accuracy"]


def test_clients_distil_from_the_received_model() -> None:
    objective = fakes.build("fedagent").objective
    assert (objective.distill, objective.temperature) == (0.5, 2.0)
