"""Seconds a round in Flower's simulation: Flower's own FedAvg, and two phases of this library.

The job is the same: 10 clients, all of them train in every round, with the same model, data and
local training, and the server scores the same examples. FedAvg receives every model; the
two-phase round receives every sketch, then the models of the chosen five. Rounds of the two take
turns in one simulation, so that both meet the same machine.

    python benchmarks/flower.py --out benchmarks/results/flower.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping
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
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.data.population import Population
from fedglimpse.data.sources import load
from fedglimpse.federation.state import Layout
from fedglimpse.flower import messages as wire
from fedglimpse.flower import server as engine
from fedglimpse.flower.client import client_app, local_training
from fedglimpse.flower.strategy import GlimpseStrategy, Problem
from fedglimpse.runs.build import population_of
from fedglimpse.simulation.evaluation import Evaluator
from fedglimpse.types import LocalObjective

CLIENTS, K, ROUNDS, WARM_UP, TARGET = 10, 5, 22, 2, 1.3


def config(epochs: int = 1) -> Config:
    return resolve(
        {
            "method": "glimpse",
            "preset": "tuned-1",  # which asks for a sketch
            "data.clients": CLIENTS,
            "selection.k": K,
            "visibility.kind": "full",
            "local.epochs": epochs,
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


def both_clients(told: Mapping[str, Any]) -> ClientApp:
    """Return a client of this library that also trains as Flower's own examples do it."""
    app, train = client_app(make_model, data=my_data), local_training(my_data)

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        model = make_model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        own = {"seed": 0, "round": 0, "client": int(context.node_config["partition-id"])}
        metrics = train(model, {**context.node_config, **told, **own})
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": int(metrics["num-examples"])}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


class FedAvgRounds:
    """Rounds of Flower's own FedAvg, one at a time."""

    def __init__(self, problem: Problem) -> None:
        self.arrays = ArrayRecord(make_model().state_dict())
        self.sets = [problem.proxy, problem.test or problem.proxy]
        self.evaluator = Evaluator(make_model(), problem.num_classes)
        self.at: list[float] = []

    def judge(self, round_num: int, arrays: ArrayRecord) -> MetricRecord:
        """Score the model as the two-phase server does, and look at the clock."""
        model = make_model()
        model.load_state_dict(arrays.to_torch_state_dict())
        for x, y in self.sets:
            self.evaluator.score(Layout.of(model).read(model), x, y)
        self.at.append(time.perf_counter())
        return MetricRecord({"round": round_num})

    def play(self, grid: Grid) -> float:
        """Play one round; returns its seconds, from one score to the next."""
        self.at = []
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        done = strategy.start(
            grid=grid, initial_arrays=self.arrays, num_rounds=1, evaluate_fn=self.judge
        )
        self.arrays = done.arrays
        before, after = self.at
        return after - before


def measure(epochs: int) -> dict[str, list[float]]:
    """Return the seconds of every round after the warm-up; the two take turns, round by round."""
    settings, app, split = config(epochs), ServerApp(), population()
    data, proxy = split.dataset, split.proxy
    problem = Problem(
        make_model,
        proxy=(data.x_train[proxy], data.y_train[proxy]),
        num_classes=10,
        test=(data.x_test, data.y_test),
    )
    seconds: dict[str, list[float]] = {"fedavg": [], "two-phase": []}
    play_round = engine.run_round

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        fedavg = FedAvgRounds(problem)

        def both(*words: Any) -> dict[str, Any]:
            record = play_round(*words)
            seconds["two-phase"].append(record["seconds"])
            assert len(record["selected"]) == K
            seconds["fedavg"].append(fedavg.play(grid))
            return record

        engine.run_round = both
        GlimpseStrategy(settings, problem).start(grid=grid)
        engine.run_round = play_round

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    clients = both_clients(wire.settings_of(settings, LocalObjective()))
    run_simulation(app, clients, CLIENTS, backend_config=resources)
    assert all(len(values) == ROUNDS for values in seconds.values())
    return {kind: values[WARM_UP:] for kind, values in seconds.items()}


def summary(found: Mapping[str, list[float]]) -> dict[str, Any]:
    ratios = [two / one for two, one in zip(found["two-phase"], found["fedavg"], strict=True)]
    return {
        "rounds_measured": len(ratios),
        "median_seconds": {k: round(statistics.median(v), 3) for k, v in found.items()},
        "quartiles": {k: [round(q, 3) for q in statistics.quantiles(v)] for k, v in found.items()},
        "fastest_seconds": {k: round(min(v), 3) for k, v in found.items()},
        "ratio_of_neighbours": {
            "median": round(statistics.median(ratios), 3),
            "quartiles": [round(q, 3) for q in statistics.quantiles(ratios)],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--epochs", type=int, nargs="+", default=[20, 2])
    words = parser.parse_args()
    report = {
        "what": "seconds a round in Flower's simulation, 10 clients, all train; two-phase: 5 of "
        "them upload. Rounds of both take turns.",
        "flwr": flwr.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average_before": [round(v, 2) for v in os.getloadavg()],
        "target_ratio": TARGET,
        "local_epochs": {str(epochs): summary(measure(epochs)) for epochs in words.epochs},
    }
    text = json.dumps(report, indent=1)
    print(text)
    if words.out:
        words.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
