"""Local training of one round on a GPU: the CUDA trainer beside the serial loop, in one run.

    python benchmarks/gpu_training.py [--out FILE]

Random pictures of the real shapes; median of 5 rounds after compilation, with the device
synchronised around each. Selection, evaluation and learning are not included.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from fedglimpse import rng
from fedglimpse.federation import models as nets
from fedglimpse.federation.costs import ModelFlops
from fedglimpse.federation.devices import Precision
from fedglimpse.federation.state import Layout
from fedglimpse.runs.provenance import code
from fedglimpse.simulation.cuda.trainer import GraphedTrainer
from fedglimpse.simulation.trainers.jobs import Examples, LocalTrainer, TrainingJobs, TrainingRecipe
from fedglimpse.simulation.trainers.serial import SerialTrainer

RESULTS = Path(__file__).parent / "results" / "gpu_training.json"
EPOCHS, POOL = 3, 50_000
MODELS = {
    "cifar10": (nets.cifar_cnn, (3, 32, 32), 10, 500),
    "fashion": (nets.fashion_cnn, (1, 28, 28), 10, 600),
    "har": (nets.har_mlp, (561,), 6, 350),
}
CASES: list[tuple[str, int, Precision]] = [
    ("cifar10", 80, "bf16"),
    ("cifar10", 80, "tf32"),
    ("cifar10", 10, "bf16"),
    ("fashion", 160, "bf16"),
    ("har", 160, "tf32"),
]


def examples(name: str) -> Examples:
    _, shape, classes, _ = MODELS[name]
    draw = rng.generator(0, "bench")
    y = torch.randint(classes, (POOL,), generator=draw)
    images = len(shape) == 3
    x = torch.rand(POOL, *shape, generator=draw)
    x = (x * 255).to(torch.uint8) if images else x
    return Examples(x.cuda(), y.cuda(), augment=name == "cifar10")


def jobs_of(name: str, count: int) -> TrainingJobs:
    samples = MODELS[name][3]
    rows = torch.randint(POOL, (count, samples), generator=rng.generator(1, "bench"))
    return TrainingJobs.plain(rows, keys=torch.arange(count)).to(torch.device("cuda"))


def milliseconds(
    trainer: LocalTrainer, start: torch.Tensor, jobs: TrainingJobs, repeats: int
) -> float:
    """Return the median time of a round; the first one compiles and captures."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        trainer.train(start, jobs)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return median(times[1:])


def measure(name: str, count: int, precision: Precision, serial: bool = False) -> dict[str, object]:
    net, shape, classes, samples = MODELS[name]
    data, jobs, model = examples(name), jobs_of(name, count), net().cuda()
    recipe = TrainingRecipe("sgd", lr=0.01, batch_size=64, epochs=EPOCHS, augment=data.augment)
    start = Layout.of(model).read(model)[None]
    flops = ModelFlops.of(model, torch.rand(2, *shape).cuda(), classes).train
    kind = SerialTrainer if serial else GraphedTrainer
    spent = milliseconds(kind(model, data, recipe, precision), start, jobs, 2 if serial else 5)
    return {
        "model": name,
        "trainer": "serial" if serial else "graphed",
        "precision": precision,
        "clients": count,
        "examples_each": samples,
        "ms_per_10_clients": round(spent * 10 / count, 2),
        "tflops": round(flops * samples * EPOCHS * count / spent / 1e9, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **code(),
        "what": f"{EPOCHS} epochs, batches of 64, SGD, crop and flip for cifar10",
    }
    results = []
    cases = [(*case, False) for case in CASES] + [("cifar10", 10, "tf32", True)]
    for case in cases:
        torch.cuda.reset_peak_memory_stats()
        results.append(measure(*case))
        print(results[-1], flush=True)
        out.write_text(json.dumps({**facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
