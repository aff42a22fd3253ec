"""The files of a report: page, tables, LaTeX, one line per run (`seeds.csv`), stored study."""

from __future__ import annotations

from pathlib import Path

from fedglimpse.errors import UserError
from fedglimpse.runs.folder import write_atomically, writing
from fedglimpse.studies.report.analysis import Results
from fedglimpse.studies.report.page import page
from fedglimpse.studies.report.tables import cells_csv, latex, rows_csv
from fedglimpse.studies.results.stored import write_study


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
