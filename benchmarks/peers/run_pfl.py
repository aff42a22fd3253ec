"""Apple's pfl-research: FederatedAveraging on the simulated backend, in one process.

It averages parameters only: BatchNorm statistics stay those of the client that trained last.
"""

from __future__ import annotations

import itertools
import time
from importlib.metadata import version

import torch
import torch.nn.functional as F
from job import BATCH, EPOCHS, LR, TEST_BATCH, Case, contest, gaps
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Net(nn.Module):
    """The case's model with the two functions that the framework asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, C]`."""
        return self.inner(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return the accuracy on a batch."""
        self.eval()
        return {"accuracy": Weighted(int((self(x).argmax(1) == y).sum()), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when a central iteration, with its test, is over; listed after the test."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Take the time."""
        self.moments.append(time.perf_counter())
        return False, Metrics()


def play(case: Case, rounds: int, threads: int) -> list[float]:
    x, y, x_test, y_test = case.data()
    people = [Dataset((x[case.client(i)], y[case.client(i)])) for i in range(case.clients)]
    turns = itertools.cycle(range(case.clients))
    federation = FederatedDataset(lambda i: people[i], lambda: next(turns))
    net = Net(case.model())
    central = torch.optim.SGD(net.parameters(), lr=1.0)
    model = PyTorchModel(net, torch.optim.SGD, central)
    clock = Clock()
    test = CentralEvaluationCallback(
        Dataset((x_test, y_test)), model_eval_params=NNEvalHyperParams(local_batch_size=TEST_BATCH)
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 1,  # the first one is not tested
            evaluation_frequency=10**6,  # clients do not score the model before they train
            train_cohort_size=case.clients,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=federation, val_data=federation),
        model,
        NNTrainHyperParams(local_num_epochs=EPOCHS, local_learning_rate=LR, local_batch_size=BATCH),
        callbacks=[test, clock],
    )
    return gaps(clock.moments)


if __name__ == "__main__":
    contest(version("pfl"), play)
