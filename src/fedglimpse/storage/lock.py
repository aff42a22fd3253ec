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
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from fedglimpse.errors import UserError

SUFFIX = ".lock"
LOOK_AGAIN = 0.05  # seconds, while waiting for a lock


@contextmanager
def locked(
    folder: Path, what: str, otherwise: str = "name another --out", wait: float = 0.0
) -> Iterator[None]:
    """Hold the lock of an existing folder, or raise UserError where another process holds it.

    Args:
        folder: the folder to use alone.
        what: the work in it, such as sweep or run.
        otherwise: what a user may do instead of waiting.
        wait: seconds until the other process is taken to hold it for good.
    """
    path = folder / f"{what.replace(' ', '-')}{SUFFIX}"
    file = _take(path, what, otherwise, time.monotonic() + wait)
    try:
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def check_unlocked(path: Path, what: str, otherwise: str = "name another --out") -> None:
    """Raise UserError if another process holds the lock that this file is; arguments as above."""
    with suppress(FileNotFoundError), path.open("r+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(path, what, otherwise, file) from None
        except OSError:
            return  # this drive has no locks


def _in_use(path: Path, what: str, otherwise: str, file: TextIO) -> UserError:
    file.seek(0)
    return UserError(
        f"{path.parent} is in use by another {what} ({_owner(file.read())}): wait for it, stop it, "
        f"or {otherwise}.",
        key="--out",
    )


def _take(path: Path, what: str, otherwise: str, deadline: float) -> TextIO:
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
            in_use = _in_use(path, what, otherwise, file)
            file.close()
            if time.monotonic() >= deadline:
                raise in_use from None
            time.sleep(LOOK_AGAIN)
            continue
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
