"""Names of the operators of this package.

torch keeps what it compiles on disk, by the names of the operators in it and not by what they do.
So a name carries a digest of the code here: another version of fedglimpse has other names, and
nothing stale is ever run.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


def named(operator: str) -> str:
    """Return the full name of an operator."""
    return f"fedglimpse::{operator}_{digest(Path(__file__).parent)}"


@cache
def digest(folder: Path) -> str:
    """Return eight hexadecimal digits that change with any Python file of a folder."""
    parts = [file.name.encode() + file.read_bytes() for file in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:8]
