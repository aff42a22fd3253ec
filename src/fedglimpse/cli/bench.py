"""Measure the engine on this machine, on random examples of the real shapes.

`round`: whole rounds of several lanes with everything in them, and the share of every part.
`engine`: local training alone, trainer by trainer.

`fedglimpse bench`: how fast this machine is, and where a round's time goes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, cast

import torch
import typer
from rich.console import Console
from rich.table import Table

from fedglimpse import rng
from fedglimpse.config.checks import check, pick_device
from fedglimpse.config.loading import resolve
from fedglimpse.config.schema import Config
from fedglimpse.data.dataset import Dataset
from fedglimpse.errors import UserError, nearest
from fedglimpse.federation.devices import Precision, check_precision
from fedglimpse.runs.build import Parts, world_of
from fedglimpse.runs.folder import write_atomically, writing
from fedglimpse.runs.provenance import environment
from fedglimpse.runs.rounds import crew_of, play_round
from fedglimpse.runs.selectors import Crew
from fedglimpse.simulation.world import World

SHAPES = {  # examples in training and test set, their shape, classes, clients
    "cifar10": (50_000, 10_000, (3, 32, 32), 10, 100),
    "fashion": (60_000, 10_000, (1, 28, 28), 10, 100),
    "har": (10_500, 2_947, (561,), 6, 30),
    "digits": (1_437, 360, (1, 8, 8), 10, 40),
}
PARTS = ("train", "reports", "select", "aggregate", "evaluate", "learn")
TEST_EVERY = 10  # rounds between scores on the test set
WARM_UP = 45  # rounds until the agents learn from full mini-batches


def random_data(name: str) -> Dataset:
    """Return noise of the shape of a dataset; labels are noise too."""
    train, test, shape, classes, _ = SHAPES[name]
    draw = rng.generator(0, "bench")

    def examples(count: int) -> torch.Tensor:
        if len(shape) == 3:
            return torch.randint(256, (count, *shape), generator=draw, dtype=torch.uint8)
        return torch.randn(count, *shape, generator=draw)

    def labels(count: int) -> torch.Tensor:
        return torch.randint(classes, (count,), generator=draw)

    return Dataset(
        name=name,
        label=f"{name} (noise)",
        x_train=examples(train),
        y_train=labels(train),
        x_test=examples(test),
        y_test=labels(test),
        num_classes=classes,
    )


def settings(name: str, lanes: int, device: str, precision: str, trainer: str) -> Config:
    """Return the paper's round: 10 visible clients train, 5 are chosen by the agent.

    Raises:
        UserError: for a dataset whose shape is not known, or a setting that cannot be.
    """
    if name not in SHAPES:
        raise UserError(
            f"--dataset {name} is unknown.{nearest(name, SHAPES)} Use {', '.join(SHAPES)}."
        )
    config = resolve(
        {
            "method": "glimpse",
            "seeds": list(range(lanes)),
            "data.name": name,
            "data.partition": "iid",
            "data.clients": SHAPES[name][4],
            "engine.device": device,
            "engine.precision": precision,
            "engine.trainer": trainer,
        }
    )
    check(config)
    check_precision(pick_device(device), cast(Precision, precision))
    return config


def noise_world(config: Config) -> tuple[World, torch.device]:
    """Build a world on noise in place of its dataset, and say where it is."""
    place, precision = pick_device(config.engine.device), cast(Precision, config.engine.precision)
    data = random_data(config.data.name).to(place)
    return world_of(Parts(config, data, place, precision), [config]), place


@dataclass
class Stopwatch:
    """Time spent in the parts of a round, the device waited for at every change of part."""

    device: torch.device
    spent: dict[str, float] = field(default_factory=dict)  # seconds
    _open: list[tuple[str, float]] = field(default_factory=list)

    def now(self) -> float:
        """Return the time when all work so far is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the block for `name`, and not for the part around it."""
        began = self.now()
        self._open.append((name, 0.0))
        try:
            yield
        finally:
            took = self.now() - began
            _, inside = self._open.pop()
            self.spent[name] = self.spent.get(name, 0.0) + took - inside
            if self._open:
                outer, inner = self._open.pop()
                self._open.append((outer, inner + took))

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count every call of a method of one object for `name`."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)


def watch_round(world: World, crew: Crew, stopwatch: Stopwatch) -> None:
    """Let a stopwatch see the parts of a world's rounds."""
    stopwatch.watch(world.trainer, "train", "train")
    stopwatch.watch(world.reporter, "report", "reports")
    stopwatch.watch(crew, "select", "select")
    stopwatch.watch(world, "_aggregate", "aggregate")
    stopwatch.watch(world.evaluator, "scores_later", "evaluate")
    stopwatch.watch(crew, "feedback", "learn")


def bench_round(
    name: str, lanes: int, device: str, precision: str, rounds: int = 20, trainer: str = "auto"
) -> dict[str, Any]:
    """Time whole rounds: reports, agent, aggregation, proxy reward, test accuracy now and then."""
    world, place = noise_world(settings(name, lanes, device, precision, trainer))
    crew, stopwatch = crew_of(world), Stopwatch(place)
    warm = WARM_UP if rounds >= 10 else 2  # a quick look does without the agents' learning
    for i in range(warm):
        play_round(world, i == 0, crew)
    whole, flops = [], 0
    for i in range(rounds):
        began = stopwatch.now()
        records = play_round(world, i % TEST_EVERY == 0, crew)
        whole.append(stopwatch.now() - began)
        flops = sum(r["client_flops"] for r in records)
    watch_round(world, crew, stopwatch)
    for i in range(TEST_EVERY):
        with stopwatch.part("other"):
            play_round(world, i == 0, crew)
    spent = {part: stopwatch.spent.get(part, 0.0) / TEST_EVERY for part in (*PARTS, "other")}
    total = sum(spent.values())
    return {
        "dataset": name,
        "lanes": lanes,
        "precision": precision,
        "trainer": type(world.trainer).__name__,
        "rounds": rounds,
        "ms_per_lane_round": round(sum(whole) / rounds / lanes * 1e3, 3),
        "median_ms_per_lane_round": round(median(whole) / lanes * 1e3, 3),
        "tflops_in_training": round(flops / max(spent["train"], 1e-9) / 1e12, 2),
        "peak_gib": _peak(place),
        "share": {part: round(seconds / total, 4) for part, seconds in spent.items()},
    }


def bench_engine(
    name: str, lanes: int, device: str, precision: str, rounds: int = 5, trainer: str = "auto"
) -> dict[str, Any]:
    """Time the local training of a round alone: 10 clients in every lane."""
    world, place = noise_world(settings(name, lanes, device, precision, trainer))
    stopwatch, took, flops = Stopwatch(place), [], 0
    original = world.trainer.train

    def timed(start: torch.Tensor, jobs: Any) -> Any:
        began = stopwatch.now()
        trained = original(start, jobs)
        took.append(stopwatch.now() - began)
        return trained

    world.trainer.train = timed  # type: ignore[method-assign]
    for _ in range(rounds + 2):
        flops = sum(r["client_flops"] for r in play_round(world, False))
    spent = median(took[2:])
    return {
        "dataset": name,
        "lanes": lanes,
        "precision": precision,
        "trainer": type(world.trainer).__name__,
        "rounds": rounds,
        "ms_per_10_clients": round(spent / lanes * 1e3, 3),
        "tflops": round(flops / spent / 1e12, 2),
        "peak_gib": _peak(place),
    }


def report(what: str, results: Any, device: str) -> dict[str, Any]:
    """Return results with the device, the code and the versions they belong to."""
    return {"what": what, "device": device, **environment(), "results": results}


def _peak(device: torch.device) -> float | None:
    """Return the largest device memory in use since the last call, in GiB."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return round(peak, 2)


Kind = Literal["engine", "round"]

TABLE_WIDTH = 150  # a narrower terminal wraps lines, but not the words of a cell
SERIAL_ROUNDS = 3  # of the plain loop, which is slow


def bench_command(
    kind: Annotated[Kind, typer.Argument(help="engine: local training alone; round: everything.")],
    dataset: Annotated[
        list[str] | None, typer.Option(help="cifar10, fashion, har, digits; repeat for several.")
    ] = None,
    lanes: Annotated[list[int] | None, typer.Option(help="Federations side by side.")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="fp32, tf32, bf16.")] = None,
    trainer: Annotated[str, typer.Option(help="auto, serial, batched, graphed.")] = "auto",
    beside: Annotated[
        bool, typer.Option("--beside-serial", help="Time the plain loop over clients too.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds that are timed.")] = 20,
    out: Annotated[Path | None, typer.Option(help="Where the JSON goes.")] = None,
) -> None:
    """Time rounds on noise of a dataset's shape, after a warm-up; medians."""
    if rounds < 1 or min(lanes or [1]) < 1:
        raise UserError(f"--rounds {rounds} and --lanes {lanes}: use numbers from 1 on.")
    place = pick_device(device)
    measure: Callable[..., dict[str, Any]] = bench_round if kind == "round" else bench_engine
    results = []
    path = out or Path("benchmarks/results") / f"bench_{kind}_{place.type}.json"
    wanted = list(product(dataset or ["digits"], lanes or [4], precision or ["fp32"]))
    for name, count, kept in wanted:
        settings(name, count, device, kept, trainer)
    for name, count, kept in wanted:
        results.append(measure(name, count, device, kept, rounds, trainer))
        if beside:
            plain = measure(name, 1, device, kept, SERIAL_ROUNDS, "serial")
            results[-1] |= _against(results[-1], plain)
        content = report(f"fedglimpse bench {kind}", results, str(place))
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(content, indent=1) + "\n")
    Console(width=max(Console().width, TABLE_WIDTH)).print(table(kind, results))
    typer.echo(f"results: {path}")


def _against(result: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, float]:
    """Say how much longer one lane takes with one client after the other."""
    unit = next(name for name in ("ms_per_lane_round", "ms_per_10_clients") if name in plain)
    return {f"serial_{unit}": plain[unit], "times_serial": round(plain[unit] / result[unit], 2)}


def table(kind: Kind, results: Sequence[dict[str, Any]]) -> Table:
    """Return the results as a table."""
    shown = Table(box=None, pad_edge=False)
    head = ["dataset", "lanes", "precision", "trainer"]
    numbers = ["ms_per_lane_round", "tflops_in_training"] if kind == "round" else []
    numbers = numbers or ["ms_per_10_clients", "tflops"]
    numbers += ["times_serial"] if "times_serial" in results[0] else []
    for column in (*head, *numbers, *(PARTS if kind == "round" else ())):
        shown.add_column(column.replace("_", " "))
    for result in results:
        shares = [f"{result['share'][part]:.0%}" for part in PARTS] if kind == "round" else []
        shown.add_row(*(str(result[name]) for name in (*head, *numbers)), *shares)
    return shown
