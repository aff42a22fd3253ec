"""Fake grids have a fake clock, so that waiting takes no time."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def _time_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("flwr") is None:
        return
    from flower_small import Clocked

    from fedglimpse.flower import server as engine

    monkeypatch.setattr(engine, "Exchange", Clocked)
