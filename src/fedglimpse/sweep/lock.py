"""One sweep in one folder: a lock that ends with the process that holds it.

The operating system drops the lock when its owner dies, however it dies; a copy of the folder is
not locked. The file says who the owner is, for the error message.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fedglimpse.errors import UserError

NAME = "sweep.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing folder, or raise UserError where another sweep has it."""
    path = folder / NAME
    file = _take(path)
    try:
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _take(path: Path) -> TextIO:
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = _owner(file.read())
            file.close()
            raise UserError(
                f"{path.parent} is in use by another sweep ({owner}): wait for it, stop it, or "
                "name another --out."
            ) from None
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
        file.close()  # its owner removed it between our two steps


def _owner(text: str) -> str:
    try:
        found = json.loads(text)
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError):
        return "which has just begun"
