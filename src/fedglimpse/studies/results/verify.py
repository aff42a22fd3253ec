"""Whether stored results are as they were written: every checksum in a folder and below it.

Nothing is imported or computed, and no file is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedglimpse.errors import UserError
from fedglimpse.storage import store
from fedglimpse.storage.checkpoint import Checkpoint
from fedglimpse.storage.lock import SUFFIX as LOCK
from fedglimpse.studies.results.stored import read_study

RECORDS = ("rounds.jsonl", "rounds.jsonl.gz")
PASSING = (LOCK, store.TEMPORARY)  # suffixes of files that no result depends on


@dataclass
class Verification:
    """What was found in a folder and below it."""

    verified: list[Path] = field(default_factory=list)
    without_checksum: list[Path] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # a sentence for each file

    def check(self, path: Path, read: Callable[[Path], object]) -> None:
        """Read a file in a way that refuses damage."""
        try:
            read(path)
        except UserError as error:
            self.damaged.append(str(error))
        except OSError as error:
            self.damaged.append(str(store.damage(path, str(error.strerror))))
        else:
            self.verified.append(path)


def verify(path: Path) -> Verification:
    """Compare the files of a run, a sweep or a comparison, or a single file, with their checksums.

    Raises:
        UserError: where there is nothing.
    """
    result = Verification()
    if path.is_file():
        _verify_file(path, [], result)
        return result
    if not path.is_dir():
        raise UserError(f"There is no {path}: name a folder of results or a file.", key="PATH")
    folders = [path]
    for inside in sorted(path.rglob("*")):
        if inside.is_dir():
            folders.append(inside)
    for folder in folders:
        _verify_folder(folder, result)
    if not result.verified and not result.without_checksum and not result.damaged:
        raise UserError(f"{path} holds no files: name a folder of results.", key="PATH")
    return result


def _verify_folder(folder: Path, result: Verification) -> None:
    try:
        listed = store.Manifest(folder).checksums
    except UserError as error:
        result.damaged.append(str(error))
        listed = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name != store.MANIFEST and path.suffix not in PASSING:
            _verify_file(path, list(listed), result)
    has_records = any((folder / name).exists() for name in RECORDS)
    if "summary.json" in listed and (folder / "summary.json").exists() and not has_records:
        fix = "restore them, or run it again"
        result.damaged.append(str(store.damage(folder, "its records are missing", fix)))


def _verify_file(path: Path, listed: list[str], result: Verification) -> None:
    if path.name in listed:
        result.check(path, store.read)
    elif path.suffix == ".pt" and store.is_sealed(path):
        result.check(path, store.unsealed)
    elif path.name.startswith("study") and path.name.endswith(".json.gz"):
        result.check(path, read_study)  # gzip has a checksum
    elif path.name == RECORDS[0] and (path.parent / "checkpoint.pt").exists():
        result.check(path, _read_counted)
    else:
        result.without_checksum.append(path)


def _read_counted(records: Path) -> None:
    """Check the records of a run that has not finished, as far as its checkpoint counts them."""
    state = Checkpoint(records.parent).read()
    if state is not None:
        store.check_beginning(records, records.read_bytes(), state)
