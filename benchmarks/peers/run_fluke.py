"""The framework fluke: its FedAVG over a data container of the case.

Its server tests in batches of 128 and computes accuracy, precision, recall and F1 by torchmetrics,
which a user cannot turn off but for replacing the evaluator; here it computes accuracy alone.
"""

from __future__ import annotations

import time
from importlib.metadata import version

from declared_ops import DECLARED
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataContainer, DataSplitter
from fluke.evaluation import ClassificationEval
from fluke.utils import ServerObserver
from job import BATCH, EPOCHS, LR, Case, contest, gaps
from torchmetrics import Accuracy


class Clock(ServerObserver):
    """Notes when the server has tested a new model."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def server_evaluation(self, round: int, eval_type: str, evals: dict, **kwargs: object) -> None:
        """Take the time."""
        self.moments.append(time.perf_counter())


def play(case: Case, rounds: int, threads: int) -> list[float]:
    assert DECLARED
    environment = FlukeENV()
    environment.set_device("cpu")
    environment.set_seed(0)
    accuracy = Accuracy(task="multiclass", num_classes=case.classes)
    judge = ClassificationEval(1, case.classes, accuracy=accuracy)
    judge.metrics = {"accuracy": accuracy}
    environment.set_evaluator(judge)
    environment.set_eval_cfg(server=True, locals=False, pre_fit=False, post_fit=False)
    settings = {
        "client": {
            "batch_size": BATCH,
            "local_epochs": EPOCHS,
            "loss": "CrossEntropyLoss",
            "optimizer": {"name": "SGD", "lr": LR},
            "scheduler": {"name": "StepLR", "gamma": 1, "step_size": 1},
        },
        "server": {"weighted": True},
        "model": case.model(),
    }
    splitter = DataSplitter(DataContainer(*case.data(), num_classes=case.classes), "iid")
    algorithm = FedAVG(case.clients, splitter, DDict(settings))
    assert [client.n_examples for client in algorithm.clients] == [case.samples] * case.clients
    clock = Clock()
    algorithm.attach(clock)
    clock.moments.append(time.perf_counter())
    algorithm.run(n_rounds=rounds, eligible_perc=1.0)
    return gaps(clock.moments[: rounds + 1])  # finalize() tests once more


if __name__ == "__main__":
    contest(version("fluke-fl"), play)
