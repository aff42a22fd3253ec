"""The commands that read results: `fedglimpse report`, `fedglimpse theory`, `fedglimpse verify`.

None of them imports code that the results name, unless --trust is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedglimpse.cli.entry import importing
from fedglimpse.cli.options import TABLE_WIDTH, Trust, check_target
from fedglimpse.errors import UserError


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="A folder of sweep, compare or run, or a study.json.gz; several: of one study, "
            "such as the folders of a sweep's shards.",
            metavar="PATH...",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the report; default: PATH/report.")
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="Variant that the others are compared with.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Accuracy to reach, 0 to 1, in every setting.")
    ] = None,
    paper: Annotated[
        Path | None, typer.Option(help="Published figures, such as study/plans/paper_table1.toml.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Report a study: a table here, and report.html, CSV, LaTeX and study.json.gz in --out."""
    for path in paths:
        if not path.exists():
            raise UserError(
                f"There is no {path}: name a folder of results or a study.json.gz.", key="PATH"
            )
    check_target(target)
    with importing():
        from fedglimpse.studies.report.analysis import Options, analyse
        from fedglimpse.studies.report.files import write_report
        from fedglimpse.studies.report.tables import show
        from fedglimpse.studies.results.load import load_study
        from fedglimpse.studies.results.study import join_studies
    names = " ".join(map(str, paths))
    studies = list(map(load_study, paths))
    study = studies[0] if len(studies) == 1 else join_studies(studies, names)
    results = analyse(study, Options(control, target, paper))
    if all(row.spread is None and not row.to_target for row in results.rows):
        raise UserError(
            f"{names} holds no finished run yet: report it when one has finished.", key="PATH"
        )
    first = paths[0]
    folder = out or (first / "report" if first.is_dir() else first.parent / "report")
    if folder.resolve() in [path.resolve() for path in paths]:
        raise UserError(
            f"--out {folder} is the folder of the results themselves: name another folder.",
            key="--out",
        )
    write_report(results, folder)
    show(results, Console(width=max(Console().width, TABLE_WIDTH)))
    typer.echo(f"\npage: {folder / 'report.html'}")


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
    trust: Trust = False,
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
    with importing():
        from fedglimpse.theory.panel import FILE, measure_run, read_panel
        from fedglimpse.theory.rank import comparison_text
        from fedglimpse.theory.text import panel_text
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


def verify(
    path: Annotated[
        Path,
        typer.Argument(help="A folder of run, sweep or compare, or one file.", metavar="PATH"),
    ],
    trust: Trust = False,
) -> None:
    """Compare results with their checksums: fedglimpse verify PATH.

    Every damaged file is named, and the exit code is then 2. Nothing is changed.
    """
    with importing():
        from fedglimpse.studies.results.verify import verify as verify_files
    result = verify_files(path)
    for sentence in result.damaged:
        typer.echo(sentence, err=True)
    for file in result.without_checksum:
        typer.echo(f"without checksum: {file}")
    typer.echo(
        f"{len(result.verified)} files as they were written, {len(result.damaged)} damaged, "
        f"{len(result.without_checksum)} without checksum: {path}"
    )
    if result.damaged:
        raise typer.Exit(2)


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
