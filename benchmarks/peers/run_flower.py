"""Flower's simulation: one Ray actor a core, FedAvg, the server tests the new model."""

from __future__ import annotations

import os
import time

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

import flwr
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import BATCH, EPOCHS, LR, TEST_BATCH, Case, contest, gaps
from torch.utils.data import DataLoader, TensorDataset

_loaders: dict[int, DataLoader] = {}  # of the clients that an actor has met


def loader(case: Case, client: int) -> DataLoader:
    if client not in _loaders:
        x, y, _, _ = case.data()
        rows = case.client(client)
        own = TensorDataset(x[rows].clone(), y[rows].clone())
        _loaders[client] = DataLoader(own, batch_size=BATCH, shuffle=True)
    return _loaders[client]


def client_app(case: Case) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)  # an actor has one core
        model = case.model()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.train()
        examples = loader(case, int(context.node_config["partition-id"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        loss_of = torch.nn.CrossEntropyLoss()
        for _ in range(EPOCHS):
            for x, y in examples:
                optimizer.zero_grad()
                loss_of(model(x), y).backward()
                optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": case.samples}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app


def play(case: Case, rounds: int, threads: int) -> list[float]:
    app, moments = ServerApp(), []
    _, _, x_test, y_test = case.data()
    test = DataLoader(TensorDataset(x_test, y_test), batch_size=TEST_BATCH)

    @torch.no_grad()
    def evaluate(round_num: int, arrays: ArrayRecord) -> MetricRecord:
        torch.set_num_threads(threads)
        model = case.model()
        model.load_state_dict(arrays.to_torch_state_dict())
        model.eval()
        hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
        moments.append(time.perf_counter())
        return MetricRecord({"accuracy": hits / len(y_test)})

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=case.clients
        )
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(case.model().state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord(),
            evaluate_fn=evaluate,
        )

    actors = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    backend = actors | {"init_args": {"num_cpus": threads}}
    run_simulation(app, client_app(case), case.clients, backend_config=backend)
    return gaps(moments)


if __name__ == "__main__":
    contest(flwr.__version__, play)
