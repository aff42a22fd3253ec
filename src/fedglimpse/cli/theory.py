"""`fedglimpse theory`: the terms of the convergence bound, measured on runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedglimpse.errors import UserError
from fedglimpse.theory.panel import FILE, measure_run, read_panel
from fedglimpse.theory.rank import comparison_text
from fedglimpse.theory.text import panel_text


def theory(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or a folder of runs such as a sweep's.")
    ],
    examples: Annotated[
        int, typer.Option(help="Examples of each client to use; 0: all of them.", min=0)
    ] = 0,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Read theory.json where it already exists.")
    ] = False,
) -> None:
    """Measure the terms of the convergence bound: fedglimpse theory RUN [RUN ...].

    Writes theory.json into each run folder. Several runs also give a rank correlation: does a
    smaller selection deviation go with faster convergence?
    """
    if reuse and examples:
        raise UserError(
            f"--examples {examples} has no effect with --reuse, which reads earlier measurements: "
            "leave one of them out.",
            key="--examples",
        )
    folders = run_folders(runs)
    panels = []
    for folder in folders:
        if reuse and (folder / FILE).exists():
            panel = read_panel(folder)
        else:
            panel = measure_run(folder, examples)
        panels.append(panel)
        if len(folders) == 1:
            typer.echo(panel_text(panel))
        typer.echo(f"results: {folder / FILE}")
    if len(folders) > 1:
        typer.echo(comparison_text(panels, [folder.name for folder in folders]))


def run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders among and below `paths`, each once."""
    folders: dict[Path, None] = {}  # in order, each once
    for path in paths:
        configs = sorted(path.rglob("config.toml")) if path.is_dir() else []
        if not configs:
            raise UserError(
                f"{path} holds no run: name a folder with a config.toml in it.", key="RUNS"
            )
        for config in configs:
            folders[config.parent] = None
    return list(folders)
