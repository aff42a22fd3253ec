"""Which tiles suit the convolutions of the CIFAR-10 CNN on this GPU, each kernel by itself.

    python benchmarks/conv_tiles.py [--out FILE] [--clients 64]

Every tile that is tried must agree with the kernel's default one. The fastest stand in the tables
of `sim/gpu/conv.py`; a round of local training is timed with and without them. Times of `moments`
hold the making of two small tensors, the same for every tile.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_training import examples, jobs_of
from torch.profiler import ProfilerActivity, profile

from fedglimpse.federation import models as nets
from fedglimpse.federation.state import Layout
from fedglimpse.runs.provenance import code
from fedglimpse.simulation.cuda import compiled, conv
from fedglimpse.simulation.cuda.conv import ConvTile, conv3x3, conv3x3_moments, conv3x3_weight_grad
from fedglimpse.simulation.cuda.trainer import GraphedTrainer
from fedglimpse.simulation.trainers.jobs import TrainingRecipe

RESULTS = Path(__file__).parent / "results" / "conv_tiles.json"
BATCH = 64
Case = tuple[str, int, int, int]  # kernel, inputs, outputs, side of the images
Try = tuple[Case, ConvTile]
LAYERS = [(32, 32, 32), (32, 64, 16), (64, 64, 16), (64, 128, 8), (128, 128, 8)]
CASES: list[Case] = [("moments", *layer) for layer in LAYERS]
CASES += [("forward", outputs, inputs, side) for inputs, outputs, side in LAYERS]  # input gradients
CASES += [("weight", *layer) for layer in LAYERS]
TABLES = {"forward": conv.FORWARD_TILES, "moments": conv.MOMENTS_TILES, "weight": conv.WEIGHT_TILES}


def tiles(case: Case) -> list[ConvTile]:
    """Return what is tried; tiles that need more than the GPU has fail when they are run."""
    kind, inputs, outputs, _ = case
    shapes = [(64, 4), (128, 4), (128, 8)]  # rows and warps
    if kind == "weight":
        pipes = [(32, 4), (64, 2), (64, 3), (128, 2)]  # terms at a time, stages
        columns = {32, 64, outputs} - ({64, 128} if outputs == 32 else set())
        found = [ConvTile(r, c, d, w, s) for (r, w), c, (d, s) in product(shapes, columns, pipes)]
        return [tile for tile in found if tile.rows * tile.columns <= 2048 * tile.warps]
    deep = {min(inputs, 64), inputs}
    wide = product([*shapes, (256, 8)], {outputs}, deep, (1, 3, 4))
    found = [ConvTile(r, c, d, w, s) for (r, w), c, d, s in wide]
    lines = product(shapes, {32, min(outputs, 64)}, (1, 2, 3)) if inputs <= 64 else ()
    return found + [ConvTile(r, c, 0, w, s) for (r, w), c, s in lines]


def tensors(case: Case, clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, and the weights or the gradient that go with them."""
    kind, inputs, outputs, side = case
    draw = torch.Generator(device="cuda").manual_seed(0)
    pictures = (clients, BATCH, side, side)
    shape = (*pictures, outputs) if kind == "weight" else (clients, 9, outputs, inputs)
    x = torch.randn(*pictures, inputs, device="cuda", generator=draw).bfloat16()
    return x, (torch.randn(*shape, device="cuda", generator=draw) / 17).bfloat16()


def run(
    case: Case, tile: ConvTile | None, x: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Run a case with a tile; None: the default one."""
    kind, inputs, outputs, _ = case
    TABLES[kind].pop((inputs, outputs), None)
    if tile is not None:
        TABLES[kind][inputs, outputs] = tile
    if kind == "weight":
        return (conv3x3_weight_grad(x, other, None, 1),)
    if kind == "forward":
        return (conv3x3(x, other, None, 1),)
    bias = torch.ones(len(x), outputs, device="cuda")
    counts = torch.full((len(x),), BATCH, device="cuda")
    return conv3x3_moments(x, other, bias, counts, 1)


def works(case: Case, tile: ConvTile) -> str:
    """Compile a tile, and compare it with the default one; returns what is wrong."""
    x, other = tensors(case, 2)
    want = run(case, None, x, other)
    try:
        found = run(case, tile, x, other)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:100]
    apart = max(_apart(a.float(), b.float()) for a, b in zip(found, want, strict=True))
    return "" if apart < 5e-3 else f"apart by {apart:.1e}"


def _apart(found: torch.Tensor, want: torch.Tensor) -> float:
    """Return how far two results are apart; sums may be in other parts."""
    if found.shape != want.shape:
        found, want = found.sum(1), want.sum(1)
    return float((found - want).norm() / want.norm())


def milliseconds(case: Case, tile: ConvTile | None, x: torch.Tensor, other: torch.Tensor) -> float:
    """Return the median time of a kernel."""
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(case, tile, x, other)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[2:])


def best_tiles(tried: Sequence[Try], wrong: Sequence[str], clients: int) -> list[dict[str, Any]]:
    """Time every tile that works; returns the fastest of every case."""
    rows = []
    for case in CASES:
        x, other = tensors(case, clients)
        fine = [t for (c, t), w in zip(tried, wrong, strict=True) if c == case and not w]
        default = milliseconds(case, None, x, other)
        times = sorted((milliseconds(case, t, x, other), t) for t in fine)
        kind, inputs, outputs, side = case
        rows.append({
            "kernel": kind, "inputs": inputs, "outputs": outputs, "side": side,
            "default_ms": round(default, 4), "ms": round(times[0][0], 4), "tile": times[0][1],
            "next": [(round(ms, 4), t) for ms, t in times[1:6]],
            "by_lines": [(round(ms, 4), t) for ms, t in times if not t.deep][:2],
            "tried": len(times),
        })  # fmt: skip
        run(case, None if default <= times[0][0] else times[0][1], x[:1], other[:1])
        print(rows[-1], flush=True)
    return rows


class Round:
    """A round of local training of the CIFAR-10 CNN."""

    def __init__(self, clients: int) -> None:
        """Compile it."""
        data, model = examples("cifar10"), nets.cifar_cnn().cuda()
        recipe = TrainingRecipe("sgd", lr=0.01, batch_size=BATCH, epochs=3, augment=True)
        self.trainer = GraphedTrainer(model, data, recipe, "bf16")
        self.start, self.jobs = Layout.of(model).read(model)[None], jobs_of("cifar10", clients)
        self.play()

    def play(self) -> float:
        """Play it once; returns milliseconds."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.trainer.train(self.start, self.jobs)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    def milliseconds(self) -> float:
        """Return the median time with the tiles as they are now."""
        self.trainer.steps.clear()  # captured with other tiles
        self.play()
        return median(self.play() for _ in range(5))


def kernels(whole: Round) -> list[tuple[str, float, int]]:
    """Return where the time of a round goes: kernel, milliseconds, calls."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        whole.play()
    rows = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    return [(e.key[:90], round(e.self_device_time_total / 1e3, 2), e.count) for e in rows[:40]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--no-rounds", action="store_true", help="time no rounds, kernels alone")
    args = parser.parse_args()
    for table in TABLES.values():
        table.clear()
    tried = [(case, tile) for case in CASES for tile in tiles(case)]
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **code(),
        "clients": args.clients,
    }
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:  # they compile
        answers = pool.map(works, *zip(*tried, strict=True), chunksize=4)
        whole = None if args.no_rounds else Round(80)
        wrong = list(answers)
    apart = sorted({w for w in wrong if w.startswith("apart")})
    print(f"{len(tried)} tiles, {sum(map(bool, wrong))} do not run; {apart}", flush=True)
    if whole is not None:
        facts |= {"default_round_ms": whole.milliseconds(), "default_kernels": kernels(whole)}
    facts["tiles"] = best_tiles(tried, wrong, args.clients)
    if whole is not None:
        torch._dynamo.reset()  # the shape of partial sums is compiled
        compiled._compiled.clear()
        whole = Round(80)
        facts |= {"round_ms": whole.milliseconds(), "kernels": kernels(whole)}
        print(f"a round: {facts['default_round_ms']:.1f} ms, now {facts['round_ms']:.1f} ms")
    args.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
