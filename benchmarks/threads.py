"""How many threads and lanes pay on a CPU: milliseconds of a round and lane.

    python benchmarks/threads.py [--threads 1 2] [--lanes 1 4 16] [--turns 5] [--data digits hapt]

Whole rounds on noise of the shape of real data (as `fedglimpse bench round`): 10 visible clients
train in every lane, 5 are chosen, the test set is scored in every tenth round. `wide` is HAPT with
a dense model of 5 million parameters. The cases of one data set and method take turns, so that a
neighbour on the machine hits all of them; `ms` is the median over turns, `fastest_ms` the fastest.
`runs/threads.py` holds what was concluded. Writes benchmarks/results/threads.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from torch import nn
from trainers import cpu_name

from fedglimpse.cli.bench import SHAPES, DataShape, random_data
from fedglimpse.config.loading import resolve
from fedglimpse.data.dataset import Dataset
from fedglimpse.runs.build import WorldSetup, world_of
from fedglimpse.runs.provenance import code
from fedglimpse.runs.rounds import run_round, selectors_of

RESULTS = Path(__file__).parent / "results" / "threads.json"
SHAPES["hapt"] = DataShape(7_767, 3_162, (561,), 12, 30)
MODELS = {"digits": "digits", "hapt": "hapt", "fashion": "fashion", "wide": "threads:wide_mlp"}
DATA_OF = {"wide": "hapt"}
METHODS = ("fedavg", "glimpse")
ROUNDS = {"digits": 10, "hapt": 10, "wide": 2, "fashion": 1}  # in a turn
WARM_UP = {"digits": 30, "hapt": 30, "wide": 2, "fashion": 1}
TEST_EVERY = 10
LEARN_START = 20  # so that short measurements include the agents' learning


def wide_mlp() -> nn.Module:
    """Return a dense model of 5.4 million parameters for 561 features."""
    return nn.Sequential(
        nn.Linear(561, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 12)
    )


@dataclass
class Case:
    """One number of lanes and threads."""

    lanes: int
    threads: int
    run: Callable[[bool], object]  # one round; with a score on the test set?
    rounds_run: int = 0
    turns: list[float] = field(default_factory=list)  # ms of a lane and round

    def turn(self, rounds: int) -> float:
        """Run some rounds; return the ms of a round and lane."""
        torch.set_num_threads(self.threads)
        began = time.perf_counter()
        for _ in range(rounds):
            self.run(self.rounds_run % TEST_EVERY == 0)
            self.rounds_run += 1
        return 1e3 * (time.perf_counter() - began) / rounds / self.lanes


def case_of(data: str, dataset: Dataset, method: str, lanes: int, threads: int) -> Case:
    """Build the world of one case."""
    torch.set_num_threads(1)
    config = resolve(
        {
            "method": method,
            "seeds": list(range(lanes)),
            "data.name": DATA_OF.get(data, data),
            "data.partition": "iid",
            "data.clients": SHAPES[DATA_OF.get(data, data)].clients,
            "model.name": MODELS[data],
            "agent.learn_start": LEARN_START,
            "engine.device": "cpu",
        }
    )
    setup = WorldSetup(config, dataset, torch.device("cpu"), "fp32")
    world = world_of(setup, [config])
    selectors = selectors_of(world)
    return Case(lanes, threads, lambda on_test: run_round(world, on_test, selectors))


def measure(data: str, method: str, args: argparse.Namespace) -> list[dict[str, object]]:
    """Measure all cases of one data set and method, which take turns."""
    dataset = random_data(DATA_OF.get(data, data))
    if data == "fashion" and args.quick:
        dataset = replace(
            dataset, x_train=dataset.x_train[:20_000], y_train=dataset.y_train[:20_000]
        )
    cases: list[Case] = []
    for lanes in args.lanes:
        for threads in args.threads:
            cases.append(case_of(data, dataset, method, lanes, threads))
    for case in cases:
        case.turn(max(WARM_UP[data] // case.lanes, LEARN_START + 2 if data != "fashion" else 1))
    for _ in range(args.turns):
        for case in cases:
            case.turns.append(case.turn(max(ROUNDS[data] // case.lanes, 1)))
    rows: list[dict[str, object]] = []
    for case in cases:
        row = {
            "data": data,
            "method": method,
            "lanes": case.lanes,
            "threads": case.threads,
            "ms": round(median(case.turns), 2),
            "fastest_ms": round(min(case.turns), 2),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lanes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--data", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--quick", action="store_true", help="a third of Fashion's images")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    load = os.getloadavg()
    rows: list[dict[str, object]] = []
    for data in args.data:
        for method in args.methods:
            rows += measure(data, method, args)
    report = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "load_average_before": [round(value, 2) for value in load],
        **code(),
        "rows": rows,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
