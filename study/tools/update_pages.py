"""Rewrite what the study's pages show of its results: python tools/update_pages.py [--check].

A generated table stands between `<!-- name:begin -->` and `<!-- name:end -->`. `--check` writes
nothing and fails where a page is stale.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from fedglimpse.studies.report.analysis import analyse
from fedglimpse.studies.report.page import page
from fedglimpse.studies.results.load import load_study
from reproduction.claims import claims_table, rules_list
from reproduction.curves import curves
from reproduction.diagnosis import diagnosis
from reproduction.headroom import headroom
from reproduction.recipe import recipe_table
from reproduction.rerun import rerun
from reproduction.section import DETAILS, section, settings
from reproduction.shelf import Shelf
from reproduction.speed import speed

STUDY = Path(__file__).parents[1]
PAGES = STUDY / "pages"
RESULTS = STUDY / "results"
SHELF = Shelf(STUDY)
SECTIONS = (  # each has its section in pages/reproduction.md, made from results/<name>
    "table1", "recipe_adam", "presets", "fig6_history", "fig7_selection", "fig8_identity",
    "components", "agent_study", "history_study", "lean_study", "proof_study", "proof",
    "taught_study", "taught", "averaged_digits", "averaged",
    "adam_study",
)  # fmt: skip
SUMMARY = "reproduction.md"


def study_section(name: str) -> str:
    """Return one study from results/<name>."""
    return section(SHELF.study(name))


def study_settings(name: str) -> str:
    """Return the settings of one study from results/<name>."""
    return settings(SHELF.study(name))


def speed_table() -> str:
    """Return the lane-rounds a minute and GPU-hours of all studies."""
    return speed([SHELF.study(name) for name in ("recipe_study", *SECTIONS)])


def rerun_table() -> str:
    """Return the runs of the accuracy table that were repeated on another machine."""
    return rerun(SHELF.study("table1").study, RESULTS / "rerun")


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "recipe": (SUMMARY, lambda: recipe_table(SHELF.study("recipe_study").study)),
    "claims": (SUMMARY, lambda: claims_table(SHELF)),
    "rules": (SUMMARY, lambda: rules_list(SHELF)),
    **{name: (SUMMARY, partial(study_section, name)) for name in SECTIONS},
    **{f"{name}-settings": (DETAILS, partial(study_settings, name)) for name in SECTIONS},
    "headroom": (SUMMARY, lambda: headroom(RESULTS / "headroom")),
    "diagnosis": (SUMMARY, lambda: diagnosis(RESULTS / "agent_diagnosis")),
    "rerun": (SUMMARY, rerun_table),
    "speed": (SUMMARY, speed_table),
}
REPORTS = {"table1.html": "table1"}  # whole pages of `fedglimpse report`
FIGURES: dict[str, Callable[[], str]] = {"table1.svg": lambda: curves(SHELF.study("table1"))}


def mark_of(name: str) -> str:
    """Return a comment that says which results a report was made from."""
    parts = sorted((RESULTS / name).glob("study*.json.gz"))
    digest = hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest()
    return f"<!-- results/{name} {digest} -->\n"


def report_of(name: str) -> str:
    """Return the page of a study in results/<name>."""
    study = load_study(RESULTS / name)
    return page(analyse(dataclasses.replace(study, source=f"results/{name}"))) + mark_of(name)


def updated(name: str) -> tuple[Path, str]:
    """Return a page and its text with one table up to date."""
    file, make = TABLES[name]
    path = PAGES / file
    before, begin, after_begin = path.read_text().partition(f"<!-- {name}:begin -->")
    _, end, after = after_begin.partition(f"<!-- {name}:end -->")
    if not (begin and end):
        sys.exit(f"{path} has no place for table '{name}': write <!-- {name}:begin --> and :end.")
    return path, f"{before}{begin}\n{make()}\n{end}{after}"


def pages() -> Iterator[tuple[Path, str, str]]:
    """Yield each page, its text when up to date, and what of it is checked.

    A page may have several tables: write what is yielded before asking for the next one.
    """
    for name in TABLES:
        yield *updated(name), f"table '{name}'"
    for file, make in FIGURES.items():
        yield PAGES / file, make(), "the picture"
    for file, study in REPORTS.items():  # long, so it is made only when its results have changed
        if not current(PAGES / file).endswith(mark_of(study)):
            yield PAGES / file, report_of(study), "the report"


def current(path: Path) -> str:
    """Return the text of a page; nothing where there is none."""
    return path.read_text() if path.exists() else ""


def main() -> None:
    """Rewrite stale pages, or with --check only name them."""
    stale = 0
    for path, text, what in pages():
        if current(path) == text:
            continue
        stale += 1
        print(f"{path}: {what} is stale")
        if "--check" not in sys.argv:
            path.write_text(text)
    sys.exit(stale if "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
