from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from command_line import fedglimpse
from fedglimpse.config.schema import Config
from settings_table import meanings

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "docs", ROOT / "study")
PAGES = [ROOT / "README.md", *(page for folder in FOLDERS for page in sorted(folder.rglob("*.md")))]

spec = importlib.util.spec_from_file_location("update_docs", ROOT / "tools" / "update_docs.py")
assert spec is not None
assert spec.loader is not None
update_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(update_docs)


@pytest.mark.parametrize("name", update_docs.TABLES)
def test_generated_tables_are_current(name: str) -> None:
    path, text = update_docs.updated(name)
    assert path.read_text() == text, "run python tools/update_docs.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", update_docs.PAGES, ids=lambda p: p.stem)
def test_measured_figures_are_those_of_the_results(page: Path) -> None:
    assert page.read_text() == update_docs.with_figures(page), "run python tools/update_docs.py"


def test_every_setting_has_a_meaning_and_a_line() -> None:
    explained = meanings()
    page = (ROOT / "docs" / "settings.md").read_text()
    assert list(explained) == list(Config().flat())
    assert [key for key, meaning in explained.items() if not meaning] == []
    assert [key for key in explained if f"| `{key}` |" not in page] == []


@pytest.mark.parametrize(
    ("part", "fence", "file", "run"),
    [
        ("## Your own data and model", "python", "my_data.py", "blobs"),
        ("### Traces", "", "sessions.csv", "traced"),
        ("### Your own pattern", "python", "my_visibility.py", "shifts"),
    ],
)
def test_the_examples_of_the_data_page_run(
    part: str, fence: str, file: str, run: str, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "data.md").read_text().partition(part)[2]
    (tmp_path / file).write_text(re.findall(rf"```{fence}\n(.*?)```", page, re.S)[0])
    command = shlex.split(re.findall(r"    (fedglimpse .+)", page)[0])
    done = fedglimpse(*command[1:], "rounds=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / run / "summary.json").exists()
