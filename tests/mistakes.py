"""How tests assert a user's mistake: by the setting that is wrong, not by the wording.

What a message says is asserted in `tests/messages/` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedglimpse.errors import UserError


@contextmanager
def mistake(key: str = "") -> Iterator[None]:
    """Expect a `UserError` about the setting `key`; empty: one that names no setting."""
    with pytest.raises(UserError) as caught:
        yield
    assert caught.value.key == key, f"the error is about {caught.value.key!r}: {caught.value}"


@contextmanager
def mistake_naming(subject: str) -> Iterator[None]:
    """Expect a `UserError` that names the user's own value, file or function, in any wording."""
    with pytest.raises(UserError) as caught:
        yield
    assert subject in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
