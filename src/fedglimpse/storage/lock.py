"""One process in one folder at a time: a lock that ends with the process that holds it.

The operating system drops the lock when its owner dies, however it dies; a copy of the folder is
not locked. The file names its owner, for the error message. On a drive without locks, other
processes are not kept out.
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

SUFFIX = ".lock"


@contextmanager
def locked(folder: Path, what: str, otherwise: str = "name another --out") -> Iterator[None]:
    """Hold the lock of an existing folder, or raise UserError where another process holds it.

    Args:
        folder: the folder to use alone.
        what: the work in it, such as sweep or run.
        otherwise: what a user may do instead of waiting.
    """
    path = folder / f"{what.replace(' ', '-')}{SUFFIX}"
    file = _take(path, what, otherwise)
    try:
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _take(path: Path, what: str, otherwise: str) -> TextIO:
    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"Could not write to {path.parent} ({error.strerror}): free some space, fix the "
                f"permissions, or {otherwise}.",
                key="--out",
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = _owner(file.read())
            file.close()
            raise UserError(
                f"{path.parent} is in use by another {what} ({owner}): wait for it, stop it, or "
                f"{otherwise}.",
                key="--out",
            ) from None
        except OSError:
            return file  # this drive has no locks
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
        file.close()  # its owner deleted it between our two steps


def _owner(content: str) -> str:
    try:
        owner = json.loads(content)
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError):
        return "which has just begun"
