"""A wrong setting of the example app is one sentence in Flower's log, and the run has failed."""

from __future__ import annotations

import io
import logging
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs fedglimpse[flower]")

from fake_grid import FakeGrid
from flower_processes import APP
from flwr.app import Context, RecordDict

from fedglimpse.errors import UserError
from fedglimpse.flower.strategy import GlimpseStrategy, from_run_config
from fedglimpse.runs.folder import RunFolder

SETTINGS = {
    "fedglimpse.method": "glimpse",
    "fedglimpse.data.clients": 10,
    "fedglimpse.selection.k": 3,
    "terms.quorum": 0.5,
    "seed": 0,
}


@pytest.fixture
def flowers_log() -> Iterator[io.StringIO]:
    """Collect the errors of Flower's logger, and restore its filters afterwards."""
    logger = logging.getLogger("flwr")
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    filters = list(logger.filters)
    handler.setLevel(logging.ERROR)
    logger.filters.clear()
    logger.addHandler(handler)
    yield text
    logger.removeHandler(handler)
    logger.filters[:] = filters


@contextmanager
def as_flower_does() -> Iterator[None]:
    """Log the failure of a server app like Flower's own process."""
    try:
        yield
    except Exception as error:
        logger = logging.getLogger("flwr")
        logger.log(logging.ERROR, "%s raised an exception", "ServerApp", exc_info=error)
    else:
        pytest.fail("the run counts as a success")


def run_app(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """Call the example's server app with a run configuration."""
    monkeypatch.syspath_prepend(str(APP))
    app = runpy.run_path(str(APP / "server_app.py"))["app"]
    context = Context(1, 0, {}, RecordDict(), {**SETTINGS, **settings})
    with as_flower_does():
        app(FakeGrid([]), context)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"fedglimpse.method": "glimps"}, "'glimps'"),
        ({"fedglimpse.selection.k": 0}, "selection.k=0"),
        ({"fedglimpse.agent.load": "/nowhere/policy.pt"}, "/nowhere/policy.pt"),
        ({"fedglimpse.agent.lod": ""}, "agent.lod"),
        ({"terms.quorum": 2.0}, "quorum=2.0 is not a share"),
    ],
)
def test_a_wrong_setting_is_one_sentence(
    settings: dict[str, Any],
    sentence: str,
    flowers_log: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_app(monkeypatch, settings)
    check_sentence(flowers_log, sentence)


def test_a_folder_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, flowers_log: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    folder = RunFolder(tmp_path / "run")
    file.write_text("mine")
    run_app(monkeypatch, {"out": str(file)})
    check_sentence(flowers_log, "is a file")
    with folder.alone():
        run_app(monkeypatch, {"out": str(folder.path)})
    check_sentence(flowers_log, "is in use by another run")
    folder.open(from_run_config(SETTINGS)[0], resume=False)
    run_app(monkeypatch, {"out": str(folder.path), "fedglimpse.selection.k": 2})
    check_sentence(flowers_log, "selection.k=3")


def test_an_app_that_calls_only_the_strategy_logs_plainly_too(flowers_log: io.StringIO) -> None:
    problem: Any = None
    with as_flower_does():
        GlimpseStrategy({"methd": "glimpse"}, problem)
    check_sentence(flowers_log, "methd")


def test_an_unexpected_error_keeps_its_traceback(flowers_log: io.StringIO) -> None:
    with pytest.raises(UserError):
        from_run_config({"seed": "x"})
    with as_flower_does():
        raise ValueError("a fault")
    assert flowers_log.getvalue().startswith("ServerApp raised an exception\nTraceback")


def check_sentence(log: io.StringIO, part: str) -> None:
    """Check that the log is one line of the library, and empty it."""
    text = log.getvalue()
    log.seek(0)
    log.truncate()
    assert text.startswith("fedglimpse: ")
    assert part in text
    assert text.count("\n") == 1
