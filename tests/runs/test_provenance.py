"""Results can be traced to the code that made them, with a repository at hand or without one."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedglimpse.config.loading import resolve
from fedglimpse.runs import provenance
from fedglimpse.runs.folder import RunFolder

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of other files, with names that git does not sort as Python does."""
    package_folder = tmp_path / "repository" / "src" / "package"
    for name in ("a/inner/deep.py", "a.py", "a-b.py", "a0.py", "b/é.txt", "__pycache__/a.pyc"):
        (package_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (package_folder / name).write_text(name)
    monkeypatch.setattr(provenance, "PACKAGE", package_folder)
    _forget()
    yield package_folder
    _forget()


def _forget() -> None:
    provenance.tree.cache_clear()
    provenance.commit.cache_clear()


def git(at: Path, *words: str) -> str:
    author = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    done = subprocess.run(
        ["git", *author, *words], cwd=at, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def committed(package: Path) -> Path:
    top = package.parent.parent
    (top / ".gitignore").write_text("__pycache__/\n")
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-qm", "all of it")
    return top


@needs_git
def test_code_has_the_name_that_git_gives_it(package: Path) -> None:
    top = committed(package)
    assert provenance.tree() == git(top, "rev-parse", "HEAD:src/package")
    assert provenance.commit() == git(top, "rev-parse", "--short", "HEAD")


@needs_git
def test_code_that_was_not_committed_shows(package: Path) -> None:
    top = committed(package)
    (package / "a/inner/deep.py").write_text("other")
    assert provenance.tree() != git(top, "rev-parse", "HEAD:src/package")
    assert provenance.commit() == git(top, "rev-parse", "--short", "HEAD") + "-dirty"


@needs_git
def test_an_installed_copy_inside_somebodys_repository_is_no_commit_of_theirs(
    package: Path,
) -> None:
    top = package.parent.parent
    (top / ".gitignore").write_text("src/\n")
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-qm", "theirs")
    assert provenance.commit() == "unknown"
    assert len(provenance.tree()) == 40


def test_without_git_the_files_still_tell(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    before = provenance.tree()
    assert provenance.commit() == "unknown"
    (package / "a.py").write_text("other")
    _forget()
    assert provenance.tree() != before


def opened(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.open(resolve({"method": "fedavg", "data.name": "digits", "rounds": 1}), resume=True)
    return folder


def test_a_run_remembers_all_code_that_played_it(tmp_path: Path, package: Path) -> None:
    sources = []
    for text in ("one", "two", "two", "three"):
        (package / "a.py").write_text(text)
        _forget()
        folder = opened(tmp_path / "run")
        folder.save({})
        sources.append(provenance.tree())
    stored = json.loads(folder.environment.read_text())
    assert stored["source"] == sources[3]
    assert stored["earlier_sources"] == [sources[0], sources[1]]


def test_code_that_played_no_round_is_not_named(tmp_path: Path, package: Path) -> None:
    first = provenance.tree()
    folder = opened(tmp_path / "run")  # killed before its first checkpoint: it begins again
    (package / "a.py").write_text("other")
    _forget()
    folder = opened(tmp_path / "run")
    assert "earlier_sources" not in json.loads(folder.environment.read_text())
    folder.save({})
    folder.finish({})
    (package / "a.py").write_text("yet another")
    _forget()
    before = folder.environment.read_text()
    opened(tmp_path / "run")  # finished: nothing is left to play
    assert folder.environment.read_text() == before
    assert first not in before
