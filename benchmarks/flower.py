"""Seconds a round in Flower's simulation: Flower's own FedAvg, and two phases of this library.

The job is the same: 10 clients, all of them train in every round, with the same model, data and
local training, and the server scores the same examples. FedAvg receives every model; the
two-phase round receives every sketch, then the models of the chosen five.

    python benchmarks/flower.py --out benchmarks/results/flower.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}

import flwr
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from fedglimpse.builder import population_of
from fedglimpse.config import Config
from fedglimpse.configure import resolve
from fedglimpse.data.population import Population
from fedglimpse.data.sources import load
from fedglimpse.flower import wire
from fedglimpse.flower.client import client_app, local_training
from fedglimpse.flower.strategy import GlimpseStrategy, Problem
from fedglimpse.layout import Layout
from fedglimpse.sim.evaluate import Evaluator
from fedglimpse.types import LocalObjective

CLIENTS, K, ROUNDS, WARM_UP, TARGET = 10, 5, 12, 2, 1.3


def config() -> Config:
    return resolve(
        {
            "method": "glimpse",
            "data.clients": CLIENTS,
            "selection.k": K,
            "visibility.kind": "full",
            "local.epochs": 20,
            "rounds": ROUNDS,
        }
    )


def make_model() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.BatchNorm1d(256)]
    return nn.Sequential(*layers, nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def population() -> Population:
    return population_of(config(), load("digits"), 0)


def my_data(settings: Any) -> tuple[Tensor, Tensor]:
    split = population()
    rows = split.rows[int(settings["partition-id"])]
    return split.dataset.x_train[rows], split.dataset.y_train[rows]


def fedavg_client() -> ClientApp:
    """Return a client as Flower's own examples write it, with the same local training."""
    app = ClientApp()
    train = local_training(my_data)

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        model = make_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        settings = {
            **context.node_config,
            **wire.settings_of(config(), LocalObjective()),
            **{"seed": 0, "round": 0, "client": int(context.node_config["partition-id"])},
        }
        metrics = train(model, settings)
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": int(metrics["num-examples"])}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def fedavg_server(seconds: list[float]) -> ServerApp:
    app, split = ServerApp(), population()
    evaluator = Evaluator(make_model(), 10)
    data, proxy = split.dataset, split.proxy
    sets = [(data.x_train[proxy], data.y_train[proxy]), (data.x_test, data.y_test)]
    last = [0.0]

    def judge(round_num: int, arrays: ArrayRecord) -> MetricRecord:
        model = make_model()
        model.load_state_dict(arrays.to_torch_state_dict())
        state = Layout.of(model).read(model)
        for x, _ in sets:
            evaluator.logits(state, x)
        if round_num:
            seconds.append(time.perf_counter() - last[0])
        last[0] = time.perf_counter()
        return MetricRecord({"round": round_num})

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        start = ArrayRecord(make_model().state_dict())
        strategy.start(
            grid=grid, initial_arrays=start, num_rounds=ROUNDS, evaluate_fn=judge,
            train_config=ConfigRecord(),
        )  # fmt: skip

    return app


def two_phase_server(seconds: list[float]) -> ServerApp:
    app, split = ServerApp(), population()
    data, proxy = split.dataset, split.proxy
    problem = Problem(
        make_model,
        proxy=(data.x_train[proxy], data.y_train[proxy]),
        num_classes=10,
        test=(data.x_test, data.y_test),
    )

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = GlimpseStrategy(config(), problem)
        strategy.start(grid=grid)
        assert strategy.finished is not None
        assert all(len(r["selected"]) == K for r in strategy.finished.records)
        seconds.extend(r["seconds"] for r in strategy.finished.records)

    return app


def measure(kind: str) -> list[float]:
    """Return the seconds of every round after the warm-up."""
    seconds: list[float] = []
    if kind == "fedavg":
        server, client = fedavg_server(seconds), fedavg_client()
    else:
        server, client = two_phase_server(seconds), client_app(make_model, data=my_data)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, CLIENTS, backend_config=resources)
    assert len(seconds) == ROUNDS
    return seconds[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    words = parser.parse_args()
    found: dict[str, list[float]] = {"fedavg": [], "two-phase": []}
    load_before = os.getloadavg()
    for _ in range(words.repeats):  # taking turns, so that both meet the same machine
        for kind in found:
            found[kind] += measure(kind)
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    report = {
        "what": "seconds a round in Flower's simulation, 10 clients, all train; 5 of 10 upload "
        "in two-phase",
        "flwr": flwr.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average_before": [round(v, 2) for v in load_before],
        "rounds_measured": len(found["fedavg"]),
        "median_seconds": {k: round(v, 3) for k, v in medians.items()},
        "quartiles": {k: [round(q, 3) for q in statistics.quantiles(v)] for k, v in found.items()},
        "ratio": round(medians["two-phase"] / medians["fedavg"], 3),
        "target_ratio": TARGET,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if words.out:
        words.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
