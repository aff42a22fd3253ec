"""`fedglimpse report`: tables and one page from a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedglimpse.cli.options import TABLE_WIDTH
from fedglimpse.errors import UserError
from fedglimpse.runs.folder import write_atomically, writing
from fedglimpse.studies.report.analysis import Options, Results, analyse, check_target
from fedglimpse.studies.report.page import page
from fedglimpse.studies.report.tables import cells_csv, latex, rows_csv
from fedglimpse.studies.report.terminal import show
from fedglimpse.studies.results import load_study, write_study


def report(
    path: Annotated[
        Path, typer.Argument(help="A folder of sweep, compare or run, or a study.json.gz.")
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
) -> None:
    """Report a study: a table here, and report.html, CSV, LaTeX and study.json.gz in --out."""
    if not path.exists():
        raise UserError(
            f"There is no {path}: name a folder of results or a study.json.gz.", key="PATH"
        )
    check_target(target)
    results = analyse(load_study(path), Options(control, target, paper))
    if all(row.spread is None and not row.to_target for row in results.rows):
        raise UserError(
            f"{path} holds no finished run yet: report it when one has finished.", key="PATH"
        )
    folder = out or (path / "report" if path.is_dir() else path.parent / "report")
    if folder.resolve() == path.resolve():
        raise UserError(
            f"--out {folder} is the folder of the results themselves: name another folder.",
            key="--out",
        )
    write_report(results, folder)
    show(results, Console(width=max(Console().width, TABLE_WIDTH)))
    typer.echo(f"\npage: {folder / 'report.html'}")


def write_report(results: Results, folder: Path) -> None:
    """Write every file of a report."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file: name a folder.", key="--out")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "report.html", page(results))
        write_atomically(folder / "results.csv", rows_csv(results))
        write_atomically(folder / "seeds.csv", cells_csv(results))
        write_atomically(folder / "results.tex", latex(results))
        write_study(results.study, folder / "study.json.gz")
