"""Files of results as another version of the program would have written them."""

from __future__ import annotations

from pathlib import Path

from fedglimpse.storage import store


def rewrite(path: Path, text: str) -> None:
    """Replace a file of a run or sweep, and its checksum."""
    store.commit(path.parent, {path.name: text.encode()})
