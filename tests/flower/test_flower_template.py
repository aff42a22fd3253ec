"""The template and the example are the same app."""

from __future__ import annotations

from pathlib import Path

from fedglimpse.cli.flower import new
from mistakes import mistake

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_app"


def test_the_example_is_what_new_writes(tmp_path: Path) -> None:
    new(tmp_path / "app")
    written = {p.name: p.read_text() for p in (tmp_path / "app").iterdir()}
    example = {p.name: p.read_text() for p in EXAMPLE.iterdir() if p.is_file()}
    assert written == example
    assert set(written) == {"client_app.py", "server_app.py", "task.py", "pyproject.toml"}


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with mistake("DIR"):
        new(tmp_path)
    with mistake("DIR"):
        new(tmp_path / "thesis.tex")
    with mistake("DIR"):
        new(tmp_path / "thesis.tex" / "app")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
