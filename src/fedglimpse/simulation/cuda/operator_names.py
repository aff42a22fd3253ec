"""Names of this room's operators, each with a digest of the code.

torch keeps what it compiles on disk, under the names of the operators in it and not by what they
do. With a digest in the name, another version of fedglimpse has other names, so that nothing stale
is ever run. Needs no Triton.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


def versioned_name(operator: str) -> str:
    """Return the full name under which torch knows an operator."""
    return f"fedglimpse::{operator}_{code_digest(Path(__file__).parent)}"


@cache
def code_digest(folder: Path) -> str:
    """Return eight hexadecimal digits that change with any Python file of a folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:8]
