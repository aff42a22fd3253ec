"""Sweeps of these tests are packed as on a machine with two cores, wherever they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedglimpse.studies.sweep import packs


@pytest.fixture(scope="session", autouse=True)
def _two_cores() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packs, "available_cores", lambda: 2)
        yield
