"""Fake grids have a fake clock, so that waiting takes no time."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def _use_the_grids_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("flwr") is None:
        return
    from small_federation import GridExchange

    from fedglimpse.flower import server

    monkeypatch.setattr(server, "Exchange", GridExchange)
