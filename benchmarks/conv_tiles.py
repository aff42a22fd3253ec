"""Which tiles suit the convolutions of the CIFAR-10 CNN on this GPU, each kernel by itself.

    python benchmarks/conv_tiles.py [--out FILE] [--clients 64]

Every tile must agree with the kernel's default one. The fastest stand in the tables of
`simulation/cuda/conv.py`; a round of local training is timed with and without them. Times of
`moments` include the making of two small tensors, the same for every tile.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu_training import examples, jobs_of
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fedglimpse.federation import models as nets
from fedglimpse.federation.state import Layout
from fedglimpse.runs.provenance import code
from fedglimpse.simulation.cuda import captured, conv
from fedglimpse.simulation.cuda.conv import ConvTile, conv3x3, conv3x3_moments, conv3x3_weight_grad
from fedglimpse.simulation.cuda.trainer import GraphedTrainer
from fedglimpse.simulation.trainers.jobs import TrainingRecipe

RESULTS = Path(__file__).parent / "results" / "conv_tiles.json"
BATCH = 64
SHAPES = ((64, 4), (128, 4), (128, 8))  # rows of a tile and its warps
LAYERS = [(32, 32, 32), (32, 64, 16), (64, 64, 16), (64, 128, 8), (128, 128, 8)]
TABLES = {"forward": conv.FORWARD_TILES, "moments": conv.MOMENTS_TILES, "weight": conv.WEIGHT_TILES}


class Case(NamedTuple):
    """A kernel on one layer of the CIFAR-10 CNN."""

    kernel: str  # a key of TABLES
    inputs: int
    outputs: int
    side: int  # of the images


CASES = [  # "forward" with inputs and outputs exchanged: that is the gradient of the inputs
    *(Case("moments", inputs, outputs, side) for inputs, outputs, side in LAYERS),
    *(
        Case("forward", outputs, inputs, side) for inputs, outputs, side in LAYERS
    ),  # input gradients
    *(Case("weight", inputs, outputs, side) for inputs, outputs, side in LAYERS),
]


def candidates(case: Case) -> list[ConvTile]:
    """Return the tiles to try; those that need more than the GPU has fail when they are run."""
    if case.kernel == "weight":
        return weight_candidates(case.outputs)
    tiles: list[ConvTile] = []
    for rows, warps in (*SHAPES, (256, 8)):
        for depth in sorted({min(case.inputs, 64), case.inputs}):
            for stages in (1, 3, 4):
                tiles.append(ConvTile(rows, case.outputs, depth, warps, stages))
    if case.inputs > 64:
        return tiles
    for rows, warps in SHAPES:
        for columns in sorted({32, min(case.outputs, 64)}):
            for stages in (1, 2, 3):
                tiles.append(ConvTile(rows, columns, 0, warps, stages))
    return tiles


def weight_candidates(outputs: int) -> list[ConvTile]:
    """Return the tiles to try for gradients of weights."""
    widths = {32} if outputs == 32 else {32, 64, outputs}
    tiles: list[ConvTile] = []
    for rows, warps in SHAPES:
        for columns in sorted(widths):
            if rows * columns > 2048 * warps:  # more than the registers hold
                continue
            for depth, stages in ((32, 4), (64, 2), (64, 3), (128, 2)):
                tiles.append(ConvTile(rows, columns, depth, warps, stages))
    return tiles


def tensors(case: Case, clients: int) -> tuple[Tensor, Tensor]:
    """Return images, and the weights or the gradient that go with them."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    images = (clients, BATCH, case.side, case.side)
    shape = (clients, 9, case.outputs, case.inputs)
    if case.kernel == "weight":
        shape = (*images, case.outputs)
    x = torch.randn(*images, case.inputs, device="cuda", generator=draw).bfloat16()
    return x, (torch.randn(*shape, device="cuda", generator=draw) / 17).bfloat16()


def use(case: Case, tile: ConvTile | None) -> None:
    """Put a tile into the kernel's table; None: take it out, which leaves the default one."""
    table = TABLES[case.kernel]
    table.pop((case.inputs, case.outputs), None)
    if tile is not None:
        table[case.inputs, case.outputs] = tile


def run(case: Case, tile: ConvTile | None, x: Tensor, operand: Tensor) -> tuple[Tensor, ...]:
    """Run a case with a tile; None: the default one."""
    use(case, tile)
    if case.kernel == "weight":
        return (conv3x3_weight_grad(x, operand, None, 1),)
    if case.kernel == "forward":
        return (conv3x3(x, operand, None, 1),)
    bias = torch.ones(len(x), case.outputs, device="cuda")
    counts = torch.full((len(x),), BATCH, device="cuda")
    return conv3x3_moments(x, operand, bias, counts, 1)


def problem_with(case: Case, tile: ConvTile) -> str:
    """Compile a tile and compare it with the default one; returns what is wrong, or nothing."""
    x, operand = tensors(case, 2)
    expected = run(case, None, x, operand)
    try:
        result = run(case, tile, x, operand)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:100]
    difference = 0.0
    for value, reference in zip(result, expected, strict=True):
        difference = max(difference, relative_difference(value.float(), reference.float()))
    return "" if difference < 5e-3 else f"differs by {difference:.1e}"


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """Return how far two results are apart; the numbers of partial sums may differ."""
    if value.shape != reference.shape:
        value = value.sum(1)
        reference = reference.sum(1)
    return float((value - reference).norm() / reference.norm())


def milliseconds(case: Case, tile: ConvTile | None, x: Tensor, operand: Tensor) -> float:
    """Return the median time of a kernel."""
    times = []
    for _ in range(12):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        run(case, tile, x, operand)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[2:])


def best_tile(case: Case, tiles: list[ConvTile], clients: int) -> dict[str, Any]:
    """Time the tiles of a case; the fastest stays in the kernel's table."""
    x, operand = tensors(case, clients)
    default = milliseconds(case, None, x, operand)
    times = sorted((milliseconds(case, tile, x, operand), tile) for tile in tiles)
    fastest, tile = times[0]
    use(case, None if default <= fastest else tile)
    line_by_line = [(round(ms, 4), tile) for ms, tile in times if tile.is_line_by_line]
    return {
        **case._asdict(),
        "default_ms": round(default, 4),
        "ms": round(fastest, 4),
        "tile": tile,
        "next": [(round(ms, 4), tile) for ms, tile in times[1:6]],
        "by_lines": line_by_line[:2],
        "tried": len(times),
    }


class TrainingRound:
    """A round of local training of the CIFAR-10 CNN."""

    def __init__(self, clients: int) -> None:
        """Compile it."""
        model = nets.cifar_cnn().cuda()
        recipe = TrainingRecipe("sgd", lr=0.01, batch_size=BATCH, epochs=3, augment=True)
        self.trainer = GraphedTrainer(model, examples("cifar10"), recipe, "bf16")
        self.start = Layout.of(model).read(model)[None]
        self.jobs = jobs_of("cifar10", clients)
        self.run()

    def run(self) -> float:
        """Run it once; returns milliseconds."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.trainer.train(self.start, self.jobs)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    def milliseconds(self) -> float:
        """Return the median time with the tiles as they are now."""
        self.trainer.steps.clear()  # captured with other tiles
        self.run()
        return median(self.run() for _ in range(5))

    def kernels(self) -> list[tuple[str, float, int]]:
        """Return where the time goes: kernel, milliseconds, calls; the slowest first."""
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            self.run()
        events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
        rows = []
        for event in events[:40]:
            ms = event.self_device_time_total / 1e3
            rows.append((event.key[:90], round(ms, 2), event.count))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--no-rounds", action="store_true", help="time no rounds, kernels alone")
    args = parser.parse_args()
    for table in TABLES.values():
        table.clear()
    attempts = [(case, tile) for case in CASES for tile in candidates(case)]
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **code(),
        "clients": args.clients,
    }
    cases, tiles = zip(*attempts, strict=True)
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:  # they compile
        answers = pool.map(problem_with, cases, tiles, chunksize=4)
        training_round = None if args.no_rounds else TrainingRound(80)
        problems = list(answers)
    failed = [problem for problem in problems if problem]
    differing = sorted({problem for problem in failed if problem.startswith("differs")})
    print(f"{len(attempts)} tiles, {len(failed)} do not run; {differing}", flush=True)
    if training_round is not None:
        facts["default_round_ms"] = training_round.milliseconds()
        facts["default_kernels"] = training_round.kernels()
    facts["tiles"] = []
    for case in CASES:
        working = [
            tile
            for (tried_case, tile), problem in zip(attempts, problems, strict=True)
            if tried_case == case and not problem
        ]
        facts["tiles"].append(best_tile(case, working, args.clients))
        print(facts["tiles"][-1], flush=True)
    if training_round is not None:
        torch._dynamo.reset()  # the shape of partial sums is compiled
        captured._compiled_losses.clear()
        training_round = TrainingRound(80)
        facts["round_ms"] = training_round.milliseconds()
        facts["kernels"] = training_round.kernels()
        print(f"a round: {facts['default_round_ms']:.1f} ms, now {facts['round_ms']:.1f} ms")
    args.out.write_text(json.dumps(facts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
