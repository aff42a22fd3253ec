from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

spec = importlib.util.spec_from_file_location("update_docs", ROOT / "tools" / "update_docs.py")
assert spec is not None
assert spec.loader is not None
update_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(update_docs)


@pytest.mark.parametrize("name", update_docs.TABLES)
def test_generated_tables_are_current(name: str) -> None:
    path, text = update_docs.updated(name)
    assert path.read_text() == text, "run python tools/update_docs.py"


@pytest.mark.parametrize("name", update_docs.FIGURES)
def test_pictures_are_current(name: str) -> None:
    assert (ROOT / name).read_text() == update_docs.FIGURES[name](), "run tools/update_docs.py"


@pytest.mark.parametrize("name", update_docs.REPORTS)
def test_reports_are_of_the_results_and_small(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text.endswith(update_docs.mark_of(update_docs.REPORTS[name])), "run tools/update_docs.py"
    assert len(text.encode()) < 5e6


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", update_docs.PAGES, ids=lambda p: p.stem)
def test_measured_figures_are_those_of_the_results(page: Path) -> None:
    assert page.read_text() == update_docs.with_figures(page), "run python tools/update_docs.py"
