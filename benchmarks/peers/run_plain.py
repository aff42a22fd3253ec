"""What a careful user writes: tensors in memory, no data loader, one client after the other."""

from __future__ import annotations

import copy
import time

import torch
import torch.nn.functional as F
from job import BATCH, EPOCHS, LR, TEST_BATCH, Case, contest
from torch import Tensor, nn


def train(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    local = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(local.parameters(), lr=LR)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(local(x[batch]), y[batch]).backward()
            optimizer.step()
    return local.state_dict()


def average(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {
        name: torch.stack([state[name].float() for state in states]).mean(0).to(value.dtype)
        for name, value in states[0].items()
    }


@torch.no_grad()
def test(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    pairs = zip(x.split(TEST_BATCH), y.split(TEST_BATCH), strict=True)
    return sum(int((model(some).argmax(1) == labels).sum()) for some, labels in pairs) / len(y)


def play(case: Case, rounds: int, threads: int) -> list[float]:
    x, y, x_test, y_test = case.data()
    model, seconds = case.model(), []
    for _ in range(rounds):
        began = time.perf_counter()
        rows = [case.client(i) for i in range(case.clients)]
        model.load_state_dict(average([train(model, x[part], y[part]) for part in rows]))
        test(model, x_test, y_test)
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    contest(torch.__version__, play)
