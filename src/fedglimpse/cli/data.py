"""`fedglimpse data`: what is there, and how to get it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from fedglimpse.cli.options import PlainCommand
from fedglimpse.data import download as fetching
from fedglimpse.data import sources

app = typer.Typer(
    help="Datasets: what is there, and how to get it.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("status", cls=PlainCommand)
def data_status() -> None:
    """Say which datasets are there, where, and whether they are what they should be."""
    typer.echo(f"data directory: {sources.data_directory()}")
    for name in sources.NAMES:
        found = sources.status(name)
        verified = {True: "verified", False: "NOT VERIFIED", None: ""}[found.verified]
        state = "present" if found.present else "missing"
        parts = [state, verified, str(found.path or ""), found.detail]
        typer.echo(f"  {name:10} " + "  ".join(p for p in parts if p))


@app.command("fetch", cls=PlainCommand)
def data_fetch(
    name: Annotated[str, typer.Argument(help="cifar10, fashion or har.")],
    base_url: Annotated[str | None, typer.Option(help="A mirror's folder.")] = None,
) -> None:
    """Download a dataset from its official address into the data directory."""
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
        path = fetching.fetch(
            name,
            base_url=base_url,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    typer.echo(f"{name}: {path}")
