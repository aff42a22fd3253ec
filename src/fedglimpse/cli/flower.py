"""`fedglimpse flower`: a ready Flower app to start from."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedglimpse.cli.options import PlainCommand
from fedglimpse.errors import UserError

app = typer.Typer(
    help="Run methods on real devices, with Flower.", no_args_is_help=True, rich_markup_mode=None
)

SUFFIX = ".in"  # of the template's files, so that no tool takes them for part of the package


@app.callback()
def about() -> None:
    """Run methods on real devices, with Flower."""


@app.command("new", cls=PlainCommand)
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write a ready Flower app into DIR: a client, a server, a task and their settings."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not empty: name a new folder.", key="DIR")
    template = resources.files("fedglimpse.flower").joinpath("template")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(template.iterdir(), key=lambda f: f.name):
            (folder / file.name.removesuffix(SUFFIX)).write_bytes(file.read_bytes())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}): name another.", key="DIR"
        ) from None
    typer.echo(f"A Flower app is in {folder}. In Flower's simulation:")
    typer.echo(
        "  FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 "
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 "
        f"flwr run {folder} --stream --federation-config 'num-supernodes=10'"
    )
    typer.echo("On devices: docs/deploy-with-flower.md.")
