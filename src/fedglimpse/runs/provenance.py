"""What a result was made with: the code, the versions, the machine, and the files it read.

`tree` is git's own name of the package folder, computed from its files. A checkout, an installed
copy and a copy without a repository give the same name; code that was never committed has a name
that no commit has. To find the commits with the code TREE:

    for c in $(git log --format=%H -- src/fedglimpse); do
        test "$(git rev-parse $c:src/fedglimpse)" = TREE && echo $c; done

Checksums of a user's own data, of the files of a visibility trace and of a loaded policy go into
environment.json, so that no run is resumed with other inputs.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fedglimpse.data.custom import checksum_of
from fedglimpse.version import DRAWS, VERSION

SOURCE = "source"  # entries of environment.json
EARLIER = "earlier_sources"
INPUTS = "inputs"
DRAWN_BY = "draws"  # which draws decide partitions and choices, see `version.py`

PACKAGE = Path(__file__).parents[1]
GENERATED = ("__pycache__",)  # folders that are not part of the code
FILE_KEYS = ("visibility.trace", "visibility.trace_devices", "agent.load")  # keys that name a file


def environment() -> dict[str, Any]:
    """Return code, versions and hardware, to be stored beside results."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "fedglimpse": VERSION,
        **code(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        DRAWN_BY: DRAWS,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def code() -> dict[str, str]:
    """Return which code this is: the name of its files, and the commit that is checked out."""
    return {SOURCE: tree(), "commit": commit()}


def draws_of(stored: Mapping[str, Any]) -> int:
    """Return which draws a run was made with: the first ones where environment.json has no entry.

    Args:
        stored: environment.json of the run; empty if there is none, which counts as today's draws.
    """
    if not stored:
        return DRAWS
    draws: int = stored.get(DRAWN_BY, 1)
    return draws


def earlier_sources(stored: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the entry on other code that ran earlier rounds of a run that is now resumed.

    Args:
        stored: environment.json of the run; older files say nothing about the code.
    """
    earlier = stored.get(EARLIER)
    candidates = list(earlier) if isinstance(earlier, list) else []
    candidates.append(stored.get(SOURCE))
    earlier_names: list[str] = []
    for source in candidates:
        if isinstance(source, str) and source != tree() and source not in earlier_names:
            earlier_names.append(source)
    return {EARLIER: earlier_names} if earlier_names else {}


@lru_cache(maxsize=1)
def tree() -> str:
    """Return git's name of the package folder at the first call; "unknown" if it is unreadable."""
    try:
        return _tree_hash(PACKAGE).hex()
    except OSError:
        return "unknown"


@lru_cache(maxsize=1)
def commit() -> str:
    """Return the commit that is checked out, with "-dirty" if the package differs from it.

    "unknown" if the package is not part of a repository.
    """
    committed = _git("rev-parse", "HEAD:./")
    if not committed:
        return "unknown"
    name = _git("rev-parse", "--short", "HEAD")
    return name if committed == tree() else f"{name}-dirty"


def _tree_hash(path: Path) -> bytes:
    """Return git's hash of a folder. Git sorts entries as if names of folders ended in a slash."""
    entries: dict[bytes, bytes] = {}
    for child in path.iterdir():
        name = child.name.encode()
        if not child.is_dir():
            digest = _object_hash(b"blob", child.read_bytes())
            entries[name] = b"100644 " + name + b"\0" + digest
        elif child.name not in GENERATED:
            entries[name + b"/"] = b"40000 " + name + b"\0" + _tree_hash(child)
    content = b"".join(entries[name] for name in sorted(entries))
    return _object_hash(b"tree", content)


def _object_hash(kind: bytes, content: bytes) -> bytes:
    header = kind + b" %d\0" % len(content)
    return hashlib.sha1(header + content, usedforsecurity=False).digest()


def _git(*arguments: str) -> str:
    """Return git's answer about the package folder; empty if it has none."""
    command = ["git", "-C", str(PACKAGE), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    except OSError:
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def inputs_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of environment.json on a run's inputs: key -> checksum.

    Args:
        config: every dotted key; without inputs there is no entry.
    """
    checksums = _checksums(config)
    return {INPUTS: checksums} if checksums else {}


def changed_input(stored: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return the key whose data or file changed since a run began; empty if none did.

    Args:
        stored: environment.json of the run; what it has no entry for counts as unchanged.
        config: every dotted key of the run.
    """
    stored_checksums = stored.get(INPUTS)
    if not isinstance(stored_checksums, Mapping):
        return ""
    for key, checksum in _checksums(config).items():
        if stored_checksums.get(key, checksum) != checksum:
            return key
    return ""


def _checksums(config: Mapping[str, Any]) -> dict[str, str]:
    checksums: dict[str, str] = {}
    data_checksum = checksum_of(str(config["data.name"]))
    if data_checksum is not None:
        checksums["data.name"] = f"{data_checksum:08x}"
    for key in FILE_KEYS:
        if key == "agent.load" and config["agent.save"]:
            continue  # the run itself may overwrite this file at its end
        path = Path(str(config[key] or ""))
        if config[key] and path.is_file():
            checksums[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return checksums
