"""Local training of one round: a plain PyTorch loop and this package's trainers, side by side.

    python benchmarks/trainers.py [--repeats 5] [--threads 2]

Variants take turns, so that a slow moment of the machine hits all of them; the figure is the median
of the repeats, and what counts is the ratio to the plain loop.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedglimpse.federation.models import fashion_cnn, har_mlp
from fedglimpse.federation.state import Layout
from fedglimpse.runs.provenance import code
from fedglimpse.simulation.trainers.batched import BatchedTrainer
from fedglimpse.simulation.trainers.choose import has_convolutions
from fedglimpse.simulation.trainers.jobs import Examples, TrainingJobs, TrainingRecipe
from fedglimpse.simulation.trainers.serial import SerialTrainer

RESULTS = Path(__file__).parent / "results" / "trainers.json"


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one example
    classes: int
    clients: int
    samples: int  # of a client


CASES = (
    Case("fashion_cnn, 5 clients x 600", fashion_cnn, (1, 28, 28), 10, 5, 600),
    Case("har_mlp, 10 clients x 350", har_mlp, (561,), 6, 10, 350),
)
RECIPE = TrainingRecipe(optimizer="sgd", lr=0.01, batch_size=64, epochs=3)


def plain_loop(model: nn.Module, x: Tensor, y: Tensor, rows: Tensor) -> list[nn.Module]:
    """What a careful user writes: tensors in memory, no data loader, one client at a time."""
    trained = []
    for client in rows:
        local = copy.deepcopy(model).train()
        optimizer = torch.optim.SGD(local.parameters(), lr=RECIPE.lr)
        for _ in range(RECIPE.epochs):
            order = client[torch.randperm(len(client))]
            for batch in order.split(RECIPE.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(local(x[batch]), y[batch]).backward()
                optimizer.step()
        trained.append(local)
    return trained


def variants_of(case: Case) -> dict[str, Callable[[], object]]:
    """Return what is timed: each trains all clients of a case once."""
    total = case.clients * case.samples
    x = torch.rand(total, *case.shape)
    y = torch.randint(case.classes, (total,))
    rows = torch.arange(total).view(case.clients, case.samples)
    model = case.model()
    start = Layout.of(model).read(model)[None]
    jobs = TrainingJobs.plain(rows, keys=torch.arange(case.clients))
    examples = Examples(x, y, augment=False)
    convolutions = has_convolutions(model)
    serial = SerialTrainer(copy.deepcopy(model), examples, RECIPE, channels_last=convolutions)
    batched = BatchedTrainer(copy.deepcopy(model), examples, RECIPE)
    return {
        "plain loop": lambda: plain_loop(model, x, y, rows),
        "serial": lambda: serial.train(start, jobs),
        "batched": lambda: batched.train(start, jobs),
    }


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Return the median seconds of every variant."""
    variants = variants_of(case)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, variant in variants.items():
            began = time.perf_counter()
            variant()
            if repeat > 0:  # the first turn warms up
                seconds[name].append(time.perf_counter() - began)
    return {name: median(values) for name, values in seconds.items()}


def cpu_name() -> str:
    """Return the processor's name where the system says it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {}
    for case in CASES:
        seconds = measure(case, arguments.repeats)
        default = "serial" if has_convolutions(case.model()) else "batched"
        ratios = {name: value / seconds["plain loop"] for name, value in seconds.items()}
        results[case.name] = {"seconds": seconds, "ratio": ratios, "default": default}
        for name, value in seconds.items():
            mark = "  <- default on a CPU" if name == default else ""
            print(f"{case.name:30} {name:12} {value:7.3f} s  ratio {ratios[name]:.2f}{mark}")
    RESULTS.parent.mkdir(exist_ok=True)
    facts = {"torch": torch.__version__, "cpu": cpu_name(), "threads": arguments.threads}
    text = json.dumps({**facts, **code(), "results": results}, indent=1)
    RESULTS.write_text(text, encoding="utf-8")
    print(f"results: {RESULTS}")


if __name__ == "__main__":
    main()
