"""`fedglimpse methods`, `schema`, `data` and `doctor`: what there is, and how to download data."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from rich.table import Table

from fedglimpse.cli.entry import importing
from fedglimpse.cli.options import PlainCommand
from fedglimpse.config.schema import config_schema
from fedglimpse.data.config import DATASETS
from fedglimpse.methods.descriptions import as_json as descriptions_json
from fedglimpse.methods.descriptions import descriptions

data_app = typer.Typer(
    help="Datasets: which are available, and how to download them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
METHODS_WIDTH = 120
METHODS_COLUMNS = ("method", "phase", "trains", "uplink a round", "confidence", "source", "idea")


def methods(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List every method with its phase, what it sends, and where it comes from."""
    described = descriptions().values()
    if as_json:
        typer.echo(descriptions_json(described))
        return
    table = Table(box=None, pad_edge=False)
    for column in METHODS_COLUMNS:
        table.add_column(column, overflow="fold")
    for method in described:
        table.add_row(
            method.name,
            method.phase,
            method.trains,
            method.uplink,
            method.confidence,
            method.source,
            method.summary,
        )
    Console(width=max(Console().width, METHODS_WIDTH)).print(table)
    typer.echo(
        "\nK: selected clients, V: visible clients, d: floats of the model, D: floats of a sketch."
    )
    typer.echo("Your own: method=package.module:build (see docs/add-a-method.md).")


def schema() -> None:
    """Print the JSON Schema of configuration files, for editors."""
    typer.echo(json.dumps(config_schema(), indent=1))


def doctor() -> None:
    """Show versions, devices and datasets of this installation."""
    with importing():
        from fedglimpse.runs.provenance import environment
    for name, value in environment().items():
        typer.echo(f"{name:12} {value}")
    data_status()


@data_app.command("status", cls=PlainCommand)
def data_status() -> None:
    """Show which datasets are present, where, and whether their files are intact."""
    with importing():
        from fedglimpse.data import sources
    typer.echo(f"data directory: {sources.data_directory()}")
    for name in DATASETS:
        status = sources.status(name)
        columns = ["present" if status.present else "missing"]
        if status.verified is not None:
            columns.append("verified" if status.verified else "NOT VERIFIED")
        if status.path:
            columns.append(str(status.path))
        if status.detail:
            columns.append(status.detail)
        typer.echo(f"  {name:10} " + "  ".join(columns))


@data_app.command("fetch", cls=PlainCommand)
def data_fetch(
    name: Annotated[
        str, typer.Argument(help="A dataset that can be downloaded: cifar10, fashion or har.")
    ],
    base_url: Annotated[
        str | None, typer.Option(help="Download from this folder of a mirror instead.")
    ] = None,
) -> None:
    """Download a dataset from its official address into the data directory."""
    with importing():
        from fedglimpse.data import download
    bar = Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(name, total=None)

        def show(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total)

        path = download.fetch(name, base_url=base_url, progress=show)
    typer.echo(f"{name}: {path}")
