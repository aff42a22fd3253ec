"""The study's pages show what its stored results hold."""

from __future__ import annotations

import pytest

import update_pages


@pytest.mark.parametrize("name", update_pages.TABLES)
def test_generated_tables_are_current(name: str) -> None:
    path, text = update_pages.updated(name)
    assert path.read_text() == text, "run make study"


@pytest.mark.parametrize("file", update_pages.FIGURES)
def test_pictures_are_current(file: str) -> None:
    assert (update_pages.PAGES / file).read_text() == update_pages.FIGURES[file](), "run make study"


@pytest.mark.parametrize("file", update_pages.REPORTS)
def test_reports_are_of_the_results_and_small(file: str) -> None:
    text = (update_pages.PAGES / file).read_text()
    assert text.endswith(update_pages.mark_of(update_pages.REPORTS[file])), "run make study"
    assert len(text.encode()) < 5e6
