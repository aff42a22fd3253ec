"""`fedglimpse bench`: how fast this machine is, on random examples with the shapes of real data.

What is measured is in `timing.py`, which imports torch.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedglimpse.cli.entry import importing
from fedglimpse.errors import UserError

Kind = Literal["engine", "round"]


def bench_command(
    kind: Annotated[Kind, typer.Argument(help="engine: local training alone; round: everything.")],
    dataset: Annotated[
        list[str] | None, typer.Option(help="cifar10, fashion, har or digits; can be repeated.")
    ] = None,
    lanes: Annotated[
        list[int] | None, typer.Option(help="Federations side by side; can be repeated.")
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="fp32, tf32 or bf16; can be repeated.")
    ] = None,
    trainer: Annotated[str, typer.Option(help="auto, serial, batched or graphed.")] = "auto",
    beside_serial: Annotated[
        bool, typer.Option("--beside-serial", help="Also time the plain loop over clients.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds to time.")] = 20,
    out: Annotated[
        Path | None, typer.Option(help="JSON file of the results; default: in benchmarks/results.")
    ] = None,
) -> None:
    """Time rounds on noise with the shape of a dataset, after a warm-up."""
    if rounds < 1:
        raise UserError(f"--rounds {rounds} must be 1 or more.", key="--rounds")
    if lanes and min(lanes) < 1:
        raise UserError(f"--lanes {min(lanes)} must be 1 or more.", key="--lanes")
    cases = product(dataset or ["digits"], lanes or [4], precision or ["fp32"])
    with importing():
        from fedglimpse.cli import timing
    timing.benchmark(
        kind,
        [timing.Case(*case) for case in cases],
        device=device,
        trainer=trainer,
        rounds=rounds,
        beside_serial=beside_serial,
        out=out,
    )
