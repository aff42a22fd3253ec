"""`fedglimpse sweep`: many runs from one file, in a folder from which it can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedglimpse.cli.entry import importing
from fedglimpse.cli.options import WorkersOption, read_number
from fedglimpse.config.loading import parse_overrides
from fedglimpse.errors import UserError
from fedglimpse.studies.sweep.plan import read_plan
from fedglimpse.studies.sweep.shard import read_shard

if TYPE_CHECKING:
    from fedglimpse.studies.sweep.runner import Engine, SweepOutcome

SHOWN_FAILURES = 10

Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for the results; default: runs/FILE.")
]
ShardOption = Annotated[
    str,
    typer.Option("--shard", help="I/N: only the I-th of N parts; others may run elsewhere."),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", help="key=value: only these runs; setting, variant, seed or any key."),
]
Without = Annotated[
    list[Path] | None,
    typer.Option("--without", help="Skip runs that are finished in this stored study or sweep."),
]


def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file, such as examples/quick.toml.")],
    out: Out = None,
    budget: Annotated[
        float | None, typer.Option(help="Stop cleanly before so many seconds have passed.")
    ] = None,
    only: Only = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value of engine.*, checkpoint.* or log.*."),
    ] = None,
    lanes: Annotated[str, typer.Option(help="Most runs side by side, or auto.")] = "auto",
    workers: WorkersOption = "auto",
    shard: ShardOption = "1/1",
    reuse: Annotated[
        list[Path] | None,
        typer.Option(help="Use finished runs of this other sweep, too."),
    ] = None,
    without: Without = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try runs again that failed before.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Use the file's [smoke] table: runs of seconds.")
    ] = False,
    engine: Annotated[str, typer.Option(help="local, or ray: an existing Ray cluster.")] = "local",
    address: Annotated[str, typer.Option(help="Address of the Ray cluster.")] = "auto",
    gpus: Annotated[
        float | None,
        typer.Option(help="ray: GPUs for each pack, such as 0.5; default: 1 if any."),
    ] = None,
    cpus: Annotated[float, typer.Option(help="ray: CPUs for each pack.")] = 1.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Run a grid of methods, settings and seeds: fedglimpse sweep FILE.toml --out DIR.

    The same command resumes a sweep that was stopped, on another machine too.
    """
    folder = out or Path("runs") / file.stem
    most_lanes = read_number("--lanes", lanes)
    processes = read_number("--workers", workers, has_effect=engine != "ray")
    part = read_shard(shard)
    plan = read_plan(file, smoke)
    with importing():
        from fedglimpse.studies.sweep.runner import SweepOptions, run_sweep
    options = SweepOptions(
        only=only or (),
        budget=budget,
        lanes=most_lanes,
        workers=processes,
        shard=part,
        extra=parse_overrides(settings or ()),
        reuse=reuse or (),
        without=without or (),
        retry_failed=retry_failed,
        quiet=quiet,
    )
    outcome = run_sweep(plan, folder, options, engine_of(engine, address, gpus, cpus))
    show_outcome(outcome, folder)


def engine_of(engine: str, address: str, gpus: float | None, cpus: float) -> Engine | None:
    """Return the function that runs packs on a cluster; None: they run here."""
    if engine == "local":
        return None
    if engine != "ray":
        raise UserError(f"--engine {engine} is unknown: use local or ray.", key="--engine")
    from fedglimpse.studies.sweep.cluster import Cluster

    return Cluster(address, gpus=gpus, cpus=cpus).run_packs


def show_outcome(outcome: SweepOutcome, folder: Path) -> None:
    """Print how many runs are done; exit with code 1 where runs failed, 130 if interrupted."""
    if outcome.reused:
        typer.echo(f"Reused {outcome.reused} runs already finished in other sweeps (--reuse).")
    if outcome.left_out:
        typer.echo(
            f"Skipped {outcome.left_out} runs already finished in other studies (--without)."
        )
    typer.echo(
        f"{outcome.done} cells done, {outcome.left} left, {len(outcome.failed)} failed: {folder}"
    )
    for cell, reason in list(outcome.failed.items())[:SHOWN_FAILURES]:
        typer.echo(f"failed: {cell}: {reason}", err=True)
    if outcome.left:
        typer.echo("Rerun the same command to continue.", err=True)
    if outcome.interrupted and outcome.left:
        raise typer.Exit(130)
    if outcome.failed:
        raise typer.Exit(1)
