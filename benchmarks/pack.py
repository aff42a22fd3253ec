"""Where the time of a mixed pack goes: runs of the accuracy table side by side, on noise.

    python benchmarks/pack.py [--only seed=1 --only "setting=cifar-10, ms*"] [--out FILE]

Means over some rounds once the agents learn: wall time, the same by part with the device waited for
between parts, and on a GPU the time of its kernels.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fedglimpse.cli.timing import Stopwatch, random_data, watch_round
from fedglimpse.federation.devices import pick_device
from fedglimpse.runs.build import WorldSetup, world_of
from fedglimpse.runs.provenance import code
from fedglimpse.runs.rounds import Selectors, run_round, selectors_of
from fedglimpse.simulation.world import World
from fedglimpse.studies.sweep.plan import configs_of, read_plan
from fedglimpse.studies.sweep.runner import cell_filter

RESULTS = Path(__file__).parent / "results" / "pack.json"
TABLE = Path(__file__).parents[1] / "study" / "plans" / "table1.toml"
SCORED = 5  # rounds between scores on the test set, as in the table


def pack(words: list[str], device: torch.device) -> World:
    """Return a world of the table's cells that fit, all of one dataset."""
    cuda, cells = device.type == "cuda", read_plan(TABLE).cells
    configs = configs_of(cells, {"engine.precision": "bf16" if cuda else "fp32"})
    fits = cell_filter(words)
    runs = [configs[cell.id] for cell in cells if fits(cell, configs[cell.id])]
    data = random_data(runs[0].data.name).to(device)
    return world_of(WorldSetup(runs[0], data, device, "bf16" if cuda else "fp32"), runs)


def milliseconds(world: World, selectors: Selectors, rounds: int, clock: Stopwatch) -> float:
    """Return the mean time of a round."""
    began = clock.now()
    for i in range(rounds):
        run_round(world, (i + 1) % SCORED == 0, selectors)
    return (clock.now() - began) / rounds * 1e3


def kernels(world: World, selectors: Selectors, clock: Stopwatch) -> dict[str, float]:
    """Return milliseconds of a round by kernel, the largest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        milliseconds(world, selectors, SCORED, clock)
    spent = [(e.key[:90], e.self_device_time_total / SCORED / 1e3) for e in found.key_averages()]
    spent.sort(key=lambda pair: -pair[1])
    whole = {"all": round(sum(ms for _, ms in spent), 1)}
    return whole | {name: round(ms, 2) for name, ms in spent[:12]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="as of fedglimpse sweep")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm", type=int, default=36, help="rounds before; agents learn from 32")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = pick_device("auto")
    began = time.perf_counter()
    world = pack(args.only or ["seed=1", "setting=cifar-10, ms*"], device)
    selectors, clock = selectors_of(world), Stopwatch(device)
    milliseconds(world, selectors, args.warm, clock)
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **code(),
        "lanes": len(world.lanes),
        "until_warm_s": round(time.perf_counter() - began, 1),
        "ms_a_round": round(milliseconds(world, selectors, args.rounds, clock), 1),
    }
    if device.type == "cuda":
        facts["kernels_ms"] = kernels(world, selectors, clock)
    watch_round(world, selectors, clock)
    for i in range(SCORED):
        with clock.phase("other"):
            run_round(world, i == SCORED - 1, selectors)
    facts["parts_ms"] = {name: round(s / SCORED * 1e3, 1) for name, s in clock.spent.items()}
    args.out.write_text(json.dumps(facts, indent=1))
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
