"""What a power loss leaves on a disk, at any file operation of a program.

    with recorded(folder) as journal:
        ...                                   # whatever writes into the folder
    for loss in losses(journal):
        journal.rebuild(loss, other_folder)   # what the disk may hold then

A `Journal` holds every step: a file that appears, content that is written, a new name, a deletion,
a sync of a file or a folder. What a step changed is on the disk for certain once it is synced: the
content of a file by a sync of the file, names by a sync of their folder. Everything else may be
lost, and in any order: that is what POSIX promises, and less than what usual file systems do.

Steps are found by Python's audit events and by looking at the folder, so that code that knows
nothing of this module is recorded as it is. Only one folder is recorded at a time.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Mode = Literal["nothing unsynced", "names alone", "any of it"]
MODES: tuple[Mode, ...] = ("nothing unsynced", "names alone", "any of it")
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
FOLDER = -1  # instead of the number of a file


@dataclass(frozen=True)
class Step:
    """One change of the folder."""

    kind: Literal["appear", "write", "move", "delete", "sync file", "sync folder", "promise"]
    path: str = ""  # relative to the folder
    file: int = 0  # a number that follows the file through renames
    content: bytes = b""
    target: str = ""  # of a move
    promise: Any = None


@dataclass(frozen=True)
class Loss:
    """A power loss: after how many steps, and what was on the disk of the unsynced ones."""

    steps: int
    mode: Mode
    seed: int = 0

    def __str__(self) -> str:
        return f"power loss after step {self.steps}, on the disk: {self.mode} ({self.seed})"


def losses(journal: Journal, seed: int = 0) -> list[Loss]:
    """Return power losses after every step, in each mode."""
    cases: list[Loss] = []
    for steps in range(journal.first, len(journal.steps) + 1):
        for mode in MODES:
            cases.append(Loss(steps, mode, seed))
    return cases


@dataclass
class Journal:
    """The steps in which a folder came to be what it is."""

    folder: Path
    steps: list[Step] = field(default_factory=list)
    names: dict[str, tuple[int, int]] = field(default_factory=dict)  # path -> inode, file
    contents: dict[int, bytes] = field(default_factory=dict)  # file -> what is in it
    announced: tuple[str, tuple[Any, ...]] | None = None  # an event whose change is not seen yet
    num_files: int = 0
    first: int = 0  # steps that only describe the folder as it was found

    def promise(self, value: object) -> None:
        """Note that from here on a power loss may not take something back."""
        self.look()
        self.steps.append(Step("promise", promise=value))

    def promises(self, loss: Loss) -> list[Any]:
        """Return what was promised before a power loss."""
        return [step.promise for step in self.steps[: loss.steps] if step.kind == "promise"]

    # ---- Recording.

    def begin(self) -> None:
        """Note what is in the folder already, all of it on the disk."""
        self.look()
        for path, (_, file) in list(self.names.items()):
            self.steps.append(Step("sync file" if file != FOLDER else "sync folder", path, file))
        self.steps.append(Step("sync folder", "."))
        self.first = len(self.steps)

    def event(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Note what has changed until now, and what is about to change."""
        self.look()
        self.announced = (name, arguments)

    def sync(self, descriptor: int) -> None:
        """Note that a file or a folder is on the disk."""
        self.look()
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        relative = self.relative(path)
        if relative is None:
            return
        if os.path.isdir(path):
            self.steps.append(Step("sync folder", relative))
        elif relative in self.names:
            self.steps.append(Step("sync file", relative, self.names[relative][1]))

    def relative(self, path: str | os.PathLike[str]) -> str | None:
        """Return a path as the journal names it; None for one that lies elsewhere."""
        absolute = os.path.abspath(os.fspath(path))
        parent = str(self.folder.parent)
        if absolute == parent:
            return "."
        return os.path.relpath(absolute, parent) if absolute.startswith(parent + os.sep) else None

    def look(self) -> None:
        """Compare the folder with what it was, and note the steps between."""
        present = self._present()
        if self.announced is not None:
            name, arguments = self.announced
            if name == "os.rename":
                self._note_move(arguments, present)
            self.announced = None
        for path in [path for path in self.names if path not in present]:
            self.steps.append(Step("delete", path))
            del self.names[path]
        for path, inode in present.items():
            if path not in self.names or self.names[path][0] != inode:
                self.num_files += 1
                file = FOLDER if inode == FOLDER else self.num_files
                self.names[path] = (inode, file)
                self.steps.append(Step("appear", path, file))
            file = self.names[path][1]
            if file != FOLDER:
                content = (self.folder.parent / path).read_bytes()
                if content != self.contents.get(file, b""):
                    self.contents[file] = content
                    self.steps.append(Step("write", path, file, content))

    def _present(self) -> dict[str, int]:
        present: dict[str, int] = {}
        if not self.folder.exists():
            return present
        present[str(self.relative(self.folder))] = FOLDER
        for path in sorted(self.folder.rglob("*")):
            inode = FOLDER if path.is_dir() else path.stat().st_ino
            present[str(self.relative(path))] = inode
        return present

    def _note_move(self, arguments: tuple[Any, ...], present: dict[str, int]) -> None:
        source = self.relative(arguments[0])
        target = self.relative(arguments[1])
        if source is None or target is None or source in present or source not in self.names:
            return
        self.names[target] = self.names.pop(source)
        self.steps.append(Step("move", source, self.names[target][1], target=target))

    # ---- Rebuilding.

    def rebuild(self, loss: Loss, folder: Path) -> None:
        """Write what the disk may hold after a power loss into another, new folder."""
        generator = random.Random(f"{loss}")
        disk = Disk()
        for step in self.steps[: loss.steps]:
            disk.apply(step)
        names = disk.names_left(loss.mode, generator)
        root = str(self.relative(self.folder))
        for path in sorted(names):
            if any(str(parent) not in names for parent in list(Path(path).parents)[:-1]):
                continue  # its folder is lost
            new = folder / Path(path).relative_to(root)
            if names[path] == FOLDER:
                new.mkdir(parents=True)
            else:
                new.write_bytes(disk.content_left(names[path], loss.mode, generator))


class Disk:
    """Names and contents, those that are certain and those that are not."""

    def __init__(self) -> None:
        self.certain_names: dict[str, int] = {}
        self.uncertain: dict[str, list[Step]] = {}  # folder -> steps since it was synced
        self.certain_contents: dict[int, bytes] = {}
        self.contents: dict[int, bytes] = {}

    def apply(self, step: Step) -> None:
        """Do what a step did."""
        if step.kind == "write":
            self.contents[step.file] = step.content
        elif step.kind == "sync file":
            self.certain_contents[step.file] = self.contents.get(step.file, b"")
        elif step.kind == "sync folder":
            for earlier in self.uncertain.pop(step.path, []):
                rename(self.certain_names, earlier)
        elif step.kind != "promise":
            self.uncertain.setdefault(str(Path(step.path).parent), []).append(step)

    def names_left(self, mode: Mode, generator: random.Random) -> dict[str, int]:
        """Return path -> file after a power loss."""
        names = dict(self.certain_names)
        for steps in self.uncertain.values():
            for step in steps:
                survives = {
                    "nothing unsynced": False,
                    "names alone": True,
                    "any of it": generator.random() < 0.5,
                }
                if survives[mode]:
                    rename(names, step)
        return names

    def content_left(self, file: int, mode: Mode, generator: random.Random) -> bytes:
        """Return the content of a file after a power loss: unsynced writes may be torn."""
        certain = self.certain_contents.get(file, b"")
        newest = self.contents.get(file, b"")
        if mode != "any of it" or certain == newest:
            return certain
        if newest.startswith(certain):
            return newest[: generator.randint(len(certain), len(newest))]
        return generator.choice([certain, newest, newest[: generator.randint(0, len(newest))]])


def rename(names: dict[str, int], step: Step) -> None:
    """Do to a table of names what a step did to a folder's."""
    if step.kind == "appear":
        names[step.path] = step.file
    elif step.kind == "delete":
        names.pop(step.path, None)
    else:
        names.pop(step.path, None)
        names[step.target] = step.file


# ---- Watching a program.

_listener: Callable[[str, tuple[Any, ...]], None] | None = None
_hook_is_set = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    global _listener
    listener = _listener
    if listener is None or event not in EVENTS:
        return
    _listener = None  # what the listener itself opens does not count
    try:
        listener(event, arguments)
    finally:
        _listener = listener


@contextmanager
def listening(listener: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call a function before every file operation of this process; it may raise an OSError."""
    global _listener, _hook_is_set
    if not _hook_is_set:
        sys.addaudithook(_audit)  # it cannot be taken out again
        _hook_is_set = True
    _listener = listener
    try:
        yield
    finally:
        _listener = None


@contextmanager
def recorded(folder: Path) -> Iterator[Journal]:
    """Record what happens in a folder; its parent must exist and hold nothing else."""
    journal = Journal(folder.resolve())
    journal.begin()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0]
        if isinstance(path, str | os.PathLike) and journal.relative(path) is not None:
            journal.event(event, arguments)

    fsync = os.fsync

    def noted_fsync(descriptor: Any) -> None:
        global _listener
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        listener = _listener
        _listener = None
        try:
            journal.sync(number)
        finally:
            _listener = listener
        # The data need not reach this machine's disk.

    os.fsync = noted_fsync
    try:
        with listening(note):
            yield journal
    finally:
        os.fsync = fsync
        journal.look()


@contextmanager
def failing(folder: Path, at: int, number: int = errno.ENOSPC) -> Iterator[list[int]]:
    """Let file operations in a folder fail from the n-th on, as on a full or read-only disk.

    Yields a list whose only entry counts the operations.
    """
    count = [0]
    fsync = os.fsync

    def fail() -> None:
        count[0] += 1
        if 0 <= at < count[0]:
            raise OSError(number, os.strerror(number))

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0]
        if not isinstance(path, str | os.PathLike):
            return
        reads = event == "open" and len(arguments) > 2 and not arguments[2] & 3
        inside = os.path.abspath(os.fspath(path)).startswith(str(folder.resolve()))
        deletes = event in ("os.remove", "os.rmdir")  # a full disk lets files go
        if inside and not reads and not deletes:
            fail()

    def refused_fsync(descriptor: Any) -> None:
        fail()

    os.fsync = refused_fsync
    try:
        with listening(refuse):
            yield count
    finally:
        os.fsync = fsync
