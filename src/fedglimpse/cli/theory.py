"""The subcommand `theory`: the convergence bound's terms, measured on runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedglimpse.errors import UserError
from fedglimpse.theory.measure_run import measure_run
from fedglimpse.theory.panel import FILE, read_panel
from fedglimpse.theory.rank import comparison_text
from fedglimpse.theory.text import panel_text


def theory(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or a folder of runs such as a sweep's.")
    ],
    examples: Annotated[
        int, typer.Option(help="Use so many examples of each client; 0: all of them.", min=0)
    ] = 0,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Read theory.json where it is there already.")
    ] = False,
) -> None:
    """Measure what the convergence bound is made of: fedglimpse theory RUN [RUN ...].

    Writes theory.json into each run folder. Several runs also give a rank correlation: does a
    smaller selection deviation go with faster convergence?
    """
    if reuse and examples:
        raise UserError(
            f"--examples {examples} has no effect with --reuse, which reads what was measured "
            "before: leave one of them out."
        )
    folders = run_folders(runs)
    panels = []
    for folder in folders:
        known = reuse and (folder / FILE).exists()
        panels.append(read_panel(folder) if known else measure_run(folder, examples))
        if len(folders) == 1:
            typer.echo(panel_text(panels[0]))
        typer.echo(f"results: {folder / FILE}")
    if len(folders) > 1:
        names = [folder.name for folder in folders]
        typer.echo(comparison_text(panels, names))


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders among and below `paths`."""
    found = []
    for path in paths:
        below = sorted(p.parent for p in path.rglob("config.toml")) if path.is_dir() else []
        if not below:
            raise UserError(f"{path} holds no run: name a folder with a config.toml in it.")
        found += below
    return list(dict.fromkeys(found))
