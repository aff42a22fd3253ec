"""What `fedglimpse bench` measures: rounds on noise with the shape of a dataset.

`round` times whole rounds of several lanes and shows the share of every phase of a round. `engine`
times local training alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import torch
import typer
from rich.console import Console
from rich.table import Table

from fedglimpse import rng
from fedglimpse.cli.bench import Kind
from fedglimpse.cli.options import TABLE_WIDTH
from fedglimpse.config.checks import check
from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.data.dataset import Dataset
from fedglimpse.errors import UserError, nearest
from fedglimpse.federation.devices import Precision, pick_device
from fedglimpse.runs.build import WorldSetup, device_of, world_of
from fedglimpse.runs.folder import write_atomically, writing
from fedglimpse.runs.provenance import environment
from fedglimpse.runs.rounds import Selectors, run_round, selectors_of
from fedglimpse.simulation.world import World


@dataclass(frozen=True)
class DataShape:
    """The size of a dataset and of a federation that usually trains on it."""

    train: int  # examples
    test: int
    example: tuple[int, ...]
    classes: int
    clients: int


SHAPES = {
    "cifar10": DataShape(50_000, 10_000, (3, 32, 32), 10, 100),
    "fashion": DataShape(60_000, 10_000, (1, 28, 28), 10, 100),
    "har": DataShape(10_500, 2_947, (561,), 6, 30),
    "digits": DataShape(1_437, 360, (1, 8, 8), 10, 40),
}
PHASES = ("train", "reports", "select", "aggregate", "evaluate", "learn")
TEST_EVERY = 10  # rounds between scores on the test set
WARM_UP = 45  # rounds until the agents learn from full mini-batches
SHORT_WARM_UP = 2  # for a quick look, without the agents' learning
SERIAL_ROUNDS = 3  # of the plain loop, which is slow


def random_data(name: str) -> Dataset:
    """Return noise of the shape of a dataset, with random labels."""
    shape = SHAPES[name]
    generator = rng.generator(0, "bench")

    def examples(count: int) -> torch.Tensor:
        if len(shape.example) == 3:
            size = (count, *shape.example)
            return torch.randint(256, size, generator=generator, dtype=torch.uint8)
        return torch.randn(count, *shape.example, generator=generator)

    def labels(count: int) -> torch.Tensor:
        return torch.randint(shape.classes, (count,), generator=generator)

    return Dataset(
        name=name,
        label=f"{name} (noise)",
        x_train=examples(shape.train),
        y_train=labels(shape.train),
        x_test=examples(shape.test),
        y_test=labels(shape.test),
        num_classes=shape.classes,
    )


def settings(name: str, lanes: int, device: str, precision: str, trainer: str) -> Config:
    """Return the paper's round: 10 visible clients train, of which the agent selects 5.

    Raises:
        UserError: for a dataset without a known shape, or an invalid setting.
    """
    if name not in SHAPES:
        raise UserError(
            f"--dataset {name} is unknown.{nearest(name, SHAPES)} Use {', '.join(SHAPES)}.",
            key="--dataset",
        )
    config = resolve(
        {
            "method": "glimpse",
            "seeds": list(range(lanes)),
            "data.name": name,
            "data.partition": "iid",
            "data.clients": SHAPES[name].clients,
            "engine.device": device,
            "engine.precision": precision,
            "engine.trainer": trainer,
        }
    )
    check(config)
    device_of(config)
    return config


def noise_world(config: Config) -> tuple[World, torch.device]:
    """Build a world on noise instead of its dataset; also return its device."""
    device = device_of(config)
    dataset = random_data(config.data.name).to(device)
    setup = WorldSetup(config, dataset, device, cast(Precision, config.engine.precision))
    return world_of(setup, [config]), device


@dataclass
class OpenPhase:
    """A phase of a round that is being timed."""

    name: str
    inner_seconds: float = 0.0  # spent in phases inside it


@dataclass
class Stopwatch:
    """Times the phases of a round. It waits for the device whenever the phase changes."""

    device: torch.device
    spent: dict[str, float] = field(default_factory=dict)  # seconds by phase
    _open: list[OpenPhase] = field(default_factory=list)  # outermost first

    def now(self) -> float:
        """Return the time at which all work so far is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`, and take it off the phase around it."""
        began = self.now()
        self._open.append(OpenPhase(name))
        try:
            yield
        finally:
            seconds = self.now() - began
            phase = self._open.pop()
            self.spent[name] = self.spent.get(name, 0.0) + seconds - phase.inner_seconds
            if self._open:
                self._open[-1].inner_seconds += seconds

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Add the time of every call of a method of one object to `name`."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def watch_round(world: World, selectors: Selectors, stopwatch: Stopwatch) -> None:
    """Let a stopwatch see the phases of a world's rounds."""
    stopwatch.watch(world.trainer, "train", "train")
    stopwatch.watch(world.reporter, "report", "reports")
    stopwatch.watch(selectors, "select", "select")
    stopwatch.watch(world, "aggregate", "aggregate")
    stopwatch.watch(world, "score", "evaluate")
    stopwatch.watch(selectors, "feedback", "learn")


def bench_round(
    name: str, lanes: int, device: str, precision: str, rounds: int = 20, trainer: str = "auto"
) -> dict[str, Any]:
    """Time whole rounds: reports, agent, aggregation, proxy reward and some test accuracies."""
    config = settings(name, lanes, device, precision, trainer)
    world, torch_device = noise_world(config)
    stopwatch = Stopwatch(torch_device)
    selectors = selectors_of(world)
    for i in range(WARM_UP if rounds >= 10 else SHORT_WARM_UP):
        run_round(world, i == 0, selectors)
    round_seconds: list[float] = []
    for i in range(rounds):
        began = stopwatch.now()
        records = run_round(world, i % TEST_EVERY == 0, selectors)
        round_seconds.append(stopwatch.now() - began)
    flops = sum(record["client_flops"] for record in records)
    watch_round(world, selectors, stopwatch)
    for i in range(TEST_EVERY):
        with stopwatch.phase("other"):
            run_round(world, i == 0, selectors)
    phase_seconds: dict[str, float] = {}  # of a round
    for phase in (*PHASES, "other"):
        phase_seconds[phase] = stopwatch.spent.get(phase, 0.0) / TEST_EVERY
    total = sum(phase_seconds.values())
    return {
        **_header(name, lanes, precision, world, rounds),
        "ms_per_lane_round": round(sum(round_seconds) / rounds / lanes * 1e3, 3),
        "median_ms_per_lane_round": round(median(round_seconds) / lanes * 1e3, 3),
        "tflops_in_training": round(flops / max(phase_seconds["train"], 1e-9) / 1e12, 2),
        "peak_gib": _peak_memory(torch_device),
        "share": {phase: round(seconds / total, 4) for phase, seconds in phase_seconds.items()},
    }


def bench_engine(
    name: str, lanes: int, device: str, precision: str, rounds: int = 5, trainer: str = "auto"
) -> dict[str, Any]:
    """Time the local training of a round alone: 10 clients in every lane."""
    world, torch_device = noise_world(settings(name, lanes, device, precision, trainer))
    stopwatch = Stopwatch(torch_device)
    train = world.trainer.train
    seconds: list[float] = []

    def timed(start: torch.Tensor, jobs: Any) -> Any:
        began = stopwatch.now()
        trained = train(start, jobs)
        seconds.append(stopwatch.now() - began)
        return trained

    world.trainer.train = timed  # type: ignore[method-assign]
    for _ in range(SHORT_WARM_UP + rounds):
        records = run_round(world, False)
    flops = sum(record["client_flops"] for record in records)
    typical_seconds = median(seconds[SHORT_WARM_UP:])
    return {
        **_header(name, lanes, precision, world, rounds),
        "ms_per_10_clients": round(typical_seconds / lanes * 1e3, 3),
        "tflops": round(flops / typical_seconds / 1e12, 2),
        "peak_gib": _peak_memory(torch_device),
    }


def _header(name: str, lanes: int, precision: str, world: World, rounds: int) -> dict[str, Any]:
    return {
        "dataset": name,
        "lanes": lanes,
        "precision": precision,
        "trainer": type(world.trainer).__name__,
        "rounds": rounds,
    }


def report(what: str, results: Any, device: str) -> dict[str, Any]:
    """Return results with the device, the code and the versions they belong to."""
    return {"what": what, "device": device, **environment(), "results": results}


def _peak_memory(device: torch.device) -> float | None:
    """Return the largest device memory in use since the last call, in GiB."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return round(peak, 2)


class Case(NamedTuple):
    """What one measurement is of."""

    dataset: str
    lanes: int
    precision: str


def benchmark(
    kind: Kind,
    cases: Sequence[Case],
    *,
    device: str,
    trainer: str,
    rounds: int,
    beside_serial: bool,
    out: Path | None,
) -> None:
    """Measure cases, write the results after each and print a table.

    Args:
        kind: whole rounds, or local training alone.
        cases: all of them are checked before the first one is measured.
        device: `engine.device`.
        trainer: `engine.trainer`.
        rounds: how many are timed.
        beside_serial: also time the plain loop over clients.
        out: the JSON file; None: in benchmarks/results.
    """
    for name, lanes, precision in cases:
        settings(name, lanes, device, precision, trainer)
    device_name = str(pick_device(device))
    path = out or Path("benchmarks/results") / f"bench_{kind}_{device_name.partition(':')[0]}.json"
    measure: Callable[..., dict[str, Any]] = bench_round if kind == "round" else bench_engine
    results: list[dict[str, Any]] = []
    for name, lanes, precision in cases:
        result = measure(name, lanes, device, precision, rounds, trainer)
        if beside_serial:
            serial = measure(name, 1, device, precision, SERIAL_ROUNDS, "serial")
            result |= _against_serial(result, serial)
        results.append(result)
        content = report(f"fedglimpse bench {kind}", results, device_name)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(content, indent=1) + "\n")
    Console(width=max(Console().width, TABLE_WIDTH)).print(table(kind, results))
    typer.echo(f"results: {path}")


def _against_serial(result: Mapping[str, Any], serial: Mapping[str, Any]) -> dict[str, float]:
    """Return how much longer a lane takes with one client after the other."""
    unit = "ms_per_lane_round" if "ms_per_lane_round" in serial else "ms_per_10_clients"
    return {
        f"serial_{unit}": serial[unit],
        "times_serial": round(serial[unit] / result[unit], 2),
    }


def table(kind: Kind, results: Sequence[dict[str, Any]]) -> Table:
    """Return the results as a table."""
    columns = ["dataset", "lanes", "precision", "trainer"]
    if kind == "round":
        columns += ["ms_per_lane_round", "tflops_in_training"]
    else:
        columns += ["ms_per_10_clients", "tflops"]
    if "times_serial" in results[0]:
        columns.append("times_serial")
    shares = PHASES if kind == "round" else ()
    rows = Table(box=None, pad_edge=False)
    for column in (*columns, *shares):
        rows.add_column(column.replace("_", " "))
    for result in results:
        cells = [str(result[column]) for column in columns]
        cells += [f"{result['share'][phase]:.0%}" for phase in shares]
        rows.add_row(*cells)
    return rows
