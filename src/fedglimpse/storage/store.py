"""Files that survive a power loss, and are never taken for true when they are damaged.

    write(path, content)             replace a file in one step; it is on the disk when this returns
    commit(folder, {name: content})  write several files of a folder, and their checksums
    read(path)                       return what was written, or raise UserError where it is damaged
    seal(content), unsealed(path)    a checksum at the end of a file that travels alone
    GrowingFile(path)                a file that only grows, such as the records of a run

A name points to a new file only after its content is on the disk, and a folder is synced before
anything relies on its names: `os.replace` alone promises neither.

The checksums of a folder are in its `manifest.json`, which holds one of itself, too. A file that is
about to be replaced may have its old checksum or its new one, and the manifest that says so is on
the disk before the file is. A file that is missing is not damaged: a run without a summary has not
finished. Folders of older versions have no manifest: their files are read, with one warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedglimpse.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1  # of the manifest
TEMPORARY = ".part"  # suffix of a file that is being written
RESTORE = "restore it from a copy"

_SEAL = b"\nfedglimpse blake2b "  # then 64 hexadecimal digits and a line feed, at the end of a file
_SEAL_LENGTH = len(_SEAL) + 64 + 1
_END_OF_ZIP = b"PK\x05\x06"  # torch writes zip files without a comment, which end in 22 bytes
_END_OF_ZIP_LENGTH = 22

log = logging.getLogger("fedglimpse")
_warned: set[str] = set()  # of what a warning was given once in this process


def checksum(content: bytes | memoryview) -> str:
    """Return the checksum that manifests and seals hold."""
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def damage(path: Path, reason: str, fix: str = RESTORE, key: str = "") -> UserError:
    """Return the error of a damaged file: one sentence with the file and what to do."""
    return UserError(f"{path} is damaged ({reason}): {fix}.", key=key)


# ---- Writing.


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents; their names are on the disk when this returns."""
    missing: list[Path] = []
    for path in [folder, *folder.parents]:
        if path.exists():
            break
        missing.append(path)
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def write(path: Path, *parts: bytes | memoryview) -> None:
    """Replace a file that no manifest covers; other processes may write it, too."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        write_unnamed(temporary, *parts)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_unnamed(temporary: Path, *parts: bytes | memoryview) -> None:
    """Write a file that is not looked for under this name; its content is on the disk then."""
    with temporary.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def remove(folder: Path, names: Iterable[str]) -> None:
    """Delete files of a folder, those that exist."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


# ---- The checksums of a folder.


class Manifest:
    """Which checksums the files of a folder may have: name -> one, or two while it is replaced."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest of a folder; an empty one if it has none."""
        self.path = folder / MANIFEST
        self.exists = self.path.exists()
        self.checksums: dict[str, list[str]] = {}
        if not self.exists:
            return
        try:
            content = json.loads(self.path.read_bytes())
            self.checksums = content["files"]
            is_whole = content == self._table()
        except (OSError, ValueError, KeyError, TypeError):
            is_whole = False
        if not is_whole:
            fix = f"{RESTORE}, or delete it to read the other files without verifying them"
            raise damage(self.path, "its own checksum is wrong", fix)

    def content(self) -> bytes:
        """Return the manifest as it is stored."""
        return (json.dumps(self._table(), indent=1) + "\n").encode()

    def accepts(self, name: str, content: bytes) -> bool:
        """Say whether a file has its checksum; a file that is not listed has none."""
        return name not in self.checksums or checksum(content) in self.checksums[name]

    def _table(self) -> dict[str, Any]:
        own = checksum(json.dumps(self.checksums, sort_keys=True).encode())
        return {"format": FORMAT, "files": self.checksums, "checksum": own}


def commit(
    folder: Path,
    contents: Mapping[str, bytes],
    *,
    cover: Iterable[str] = (),
    forget: Iterable[str] = (),
) -> None:
    """Write files of a folder and their checksums; all are on the disk when this returns.

    The caller keeps other processes out of the folder.

    Args:
        folder: which exists.
        contents: the files, by name; they get their names in this order.
        cover: other files that are on the disk already and will not change any more; those that
            have a checksum keep it.
        forget: files that are going to change or to be deleted: their checksums no longer count.
    """
    manifest = Manifest(folder)
    for name in forget:
        manifest.checksums.pop(name, None)
    is_replacing = False
    for name, content in contents.items():
        new = checksum(content)
        manifest.checksums[name] = [new]
        old = _checksum_of(folder / name)
        if old is not None and old != new:
            manifest.checksums[name].append(old)
            is_replacing = True
    for name in cover:
        current = _checksum_of(folder / name)
        if current is not None:
            manifest.checksums.setdefault(name, [current])
    if is_replacing:  # the manifest has to be there before a file changes
        _write_files(folder, {MANIFEST: manifest.content()})
        _write_files(folder, contents)
    else:
        _write_files(folder, {MANIFEST: manifest.content(), **contents})


def add(path: Path, content: bytes) -> None:
    """Write a file into a folder of results; one of an older version stays without a manifest."""
    if (path.parent / MANIFEST).exists():
        commit(path.parent, {path.name: content})
    else:
        write(path, content)


def _write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        write_unnamed(folder / f"{name}{TEMPORARY}", content)
    for name in contents:
        (folder / f"{name}{TEMPORARY}").replace(folder / name)
    sync_folder(folder)


def _checksum_of(path: Path) -> str | None:
    try:
        return checksum(path.read_bytes())
    except FileNotFoundError:
        return None


def is_committed(path: Path) -> bool:
    """Say whether a file is there and its folder's manifest lists it, if there is a manifest."""
    if not path.exists():
        return False
    manifest = Manifest(path.parent)
    return not manifest.exists or path.name in manifest.checksums


def read(path: Path, fix: str = RESTORE, key: str = "") -> bytes:
    """Return the content of a file, compared with its checksum.

    Args:
        path: the file.
        fix: what a user may do where it is damaged.
        key: the setting that an error is about.

    Raises:
        UserError: for a file that is damaged.
        OSError: for one that cannot be read.
    """
    manifest = Manifest(path.parent)
    content = path.read_bytes()
    if not manifest.exists:
        warn_not_verified(path.parent)
    if not manifest.accepts(path.name, content):
        content = path.read_bytes()  # another process may have replaced both in between
        if not Manifest(path.parent).accepts(path.name, content):
            raise damage(path, "its checksum is wrong", fix, key)
    return content


def check(path: Path, fix: str = RESTORE, key: str = "") -> None:
    """Raise UserError where a file is damaged; one that is missing is not."""
    if path.exists():
        read(path, fix, key)


def check_folder(folder: Path, fix: str = RESTORE, key: str = "") -> int:
    """Raise UserError where a file that the manifest lists is damaged; return how many it lists."""
    manifest = Manifest(folder)
    if not manifest.exists:
        warn_not_verified(folder)
    for name in manifest.checksums:
        path = folder / name
        if path.exists() and not manifest.accepts(name, path.read_bytes()):
            raise damage(path, "its checksum is wrong", fix, key)
    return len(manifest.checksums)


def warn_not_verified(path: Path) -> None:
    """Say once in a process that files without checksums are read."""
    if not _warned:
        log.warning(
            "%s was written by an older version, without checksums: it is read, but not verified.",
            path,
        )
    _warned.add(str(path))


# ---- A checksum at the end of a file.


def seal(content: bytes | memoryview) -> bytes:
    """Return what to write behind the content of a zip file, as torch makes it."""
    return _SEAL + checksum(content).encode() + b"\n"


def is_sealed(path: Path) -> bool:
    """Say whether a file should end in a seal: all but files of older versions do."""
    return path.read_bytes()[-_END_OF_ZIP_LENGTH:][: len(_END_OF_ZIP)] != _END_OF_ZIP


def unsealed(path: Path, fix: str = RESTORE, key: str = "") -> memoryview:
    """Return the content of a file that ends in its `seal`.

    Args:
        path: the file; one of an older version has no seal, and is read with a warning.
        fix: what a user may do where it is damaged.
        key: the setting that an error is about.

    Raises:
        UserError: for a file that is damaged.
        OSError: for one that cannot be read.
    """
    whole = path.read_bytes()
    content = memoryview(whole)[:-_SEAL_LENGTH]
    ending = whole[-_SEAL_LENGTH:]
    if ending[: len(_SEAL)] == _SEAL:
        if ending[len(_SEAL) : -1] != checksum(content).encode() or ending[-1:] != b"\n":
            raise damage(path, "its checksum is wrong", fix, key)
        return content
    if whole[-_END_OF_ZIP_LENGTH:][: len(_END_OF_ZIP)] == _END_OF_ZIP:
        warn_not_verified(path)
        return memoryview(whole)
    raise damage(path, "its end is missing" if whole else "it is empty", fix, key)


# ---- A file that grows.


class GrowingFile:
    """Lines that are only ever added; what counts is covered by a checksum kept elsewhere."""

    def __init__(self, path: Path) -> None:
        """Name the file; nothing is read or written."""
        self.path = path
        self._hash = hashlib.blake2b(digest_size=32)
        self._size: int | None = None  # bytes that went into the checksum; None: not opened yet

    def open(self, mark: Mapping[str, Any]) -> None:
        """Check what counts, and cut off what was added later.

        Args:
            mark: what `mark` returned; a checkpoint of an older version has no checksum in it.

        Raises:
            UserError: where lines that count are missing or damaged.
        """
        content = self.path.read_bytes() if self.path.exists() else b""
        check_beginning(self.path, content, mark)
        size = int(mark["bytes"])
        self._size = size
        self._hash = hashlib.blake2b(memoryview(content)[:size], digest_size=32)
        with self.path.open("ab") as file:
            file.truncate(size)

    def append(self, content: bytes) -> None:
        """Add lines; they are not on the disk before `mark`."""
        if self._size is None:
            self.open({"bytes": self.path.stat().st_size if self.path.exists() else 0})
        with self.path.open("ab") as file:
            file.write(content)
        self._hash.update(content)
        self._size = (self._size or 0) + len(content)

    def mark(self) -> dict[str, Any]:
        """Wait until all lines are on the disk; return their number of bytes and their checksum."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())
        return {"bytes": self._size or 0, "records": self._hash.hexdigest()}


def check_beginning(path: Path, content: bytes, mark: Mapping[str, Any]) -> None:
    """Raise UserError where the part of a growing file that `mark` counts is not as it was."""
    size = int(mark["bytes"])
    fix = f"{RESTORE}, or delete checkpoint.pt to start this run again from round 0"
    if len(content) < size:
        raise damage(path, f"{len(content)} bytes instead of at least {size}", fix, "--out")
    expected = mark.get("records")
    if expected is None and size == 0:
        return
    if expected is None:
        warn_not_verified(path)
    elif checksum(memoryview(content)[:size]) != expected:
        raise damage(path, "its checksum is wrong", fix, "--out")
