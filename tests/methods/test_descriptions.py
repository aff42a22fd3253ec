"""The stored table of `fedglimpse methods` says what the methods declare."""

from __future__ import annotations

import pytest

from fedglimpse.methods import registry
from fedglimpse.methods.describe import describe
from fedglimpse.methods.descriptions import descriptions


@pytest.mark.parametrize("name", registry.MODULES)
def test_the_stored_description_is_the_declared_one(name: str) -> None:
    stale = "run python tools/update_docs.py"
    assert descriptions().get(name) == describe(registry.info(name)), stale


def test_the_table_lists_the_methods_in_order() -> None:
    assert list(descriptions()) == list(registry.MODULES)
