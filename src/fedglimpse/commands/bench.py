"""`fedglimpse bench`: how fast this machine is, and where a round's time goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from fedglimpse import bench
from fedglimpse.errors import UserError
from fedglimpse.records import write_atomically, writing
from fedglimpse.validate import pick_device

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
    measure: Callable[..., dict[str, Any]] = (
        bench.bench_round if kind == "round" else bench.bench_engine
    )
    results = []
    path = out or Path("benchmarks/results") / f"bench_{kind}_{place.type}.json"
    wanted = list(product(dataset or ["digits"], lanes or [4], precision or ["fp32"]))
    for name, count, kept in wanted:
        bench.settings(name, count, device, kept, trainer)
    for name, count, kept in wanted:
        results.append(measure(name, count, device, kept, rounds, trainer))
        if beside:
            plain = measure(name, 1, device, kept, SERIAL_ROUNDS, "serial")
            results[-1] |= _against(results[-1], plain)
        content = bench.report(f"fedglimpse bench {kind}", results, str(place))
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
    for column in (*head, *numbers, *(bench.PARTS if kind == "round" else ())):
        shown.add_column(column.replace("_", " "))
    for result in results:
        shares = [f"{result['share'][part]:.0%}" for part in bench.PARTS] if kind == "round" else []
        shown.add_row(*(str(result[name]) for name in (*head, *numbers)), *shares)
    return shown
