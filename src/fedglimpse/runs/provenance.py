"""What a result was made with: the code, the versions, the machine.

`tree` is the name that git itself has for the folder of the package, worked out from its files: a
checkout, an installed copy and one without a repository give the same, and code that was never
committed has a name that no commit has. The commits whose code it is:

    for c in $(git log --format=%H -- src/fedglimpse); do
        test "$(git rev-parse $c:src/fedglimpse)" = TREE && echo $c; done

What a run reads besides its configuration and code: whether it is still what it was.

A user's own data, the files of a visibility trace and a policy that was loaded are noted in
environment.json as checksums, so that no run goes on with others in the middle.
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
from fedglimpse.version import VERSION

SOURCE, EARLIER = "source", "earlier_sources"  # entries of environment.json
HERE = Path(__file__).parents[1]  # the package
MADE = ("__pycache__",)  # beside the code, not of it


def environment() -> dict[str, Any]:
    """Return code, versions and hardware, to be stored beside results."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "fedglimpse": VERSION,
        **code(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def code() -> dict[str, str]:
    """Return which code this is, by its files and by the commit that is checked out."""
    return {SOURCE: tree(), "commit": commit()}


def earlier_sources(there: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the entry on other code that played rounds of a run which now goes on.

    Args:
        there: environment.json as the run was left; from before there were such entries, nothing
            is known.
    """
    earlier = there.get(EARLIER)
    played = [*(earlier if isinstance(earlier, list) else []), there.get(SOURCE)]
    others = [one for one in played if isinstance(one, str) and one != tree()]
    return {EARLIER: list(dict.fromkeys(others))} if others else {}


@lru_cache(maxsize=1)
def tree() -> str:
    """Return git's name of the package's folder, as it was when it was first asked for.

    "unknown" where the files cannot be read.
    """
    try:
        return _folder(HERE).hex()
    except OSError:
        return "unknown"


@lru_cache(maxsize=1)
def commit() -> str:
    """Return the commit that is checked out, "-dirty" if the package is not as it has it.

    "unknown" where the package is no part of a repository.
    """
    committed = _git("rev-parse", "HEAD:./")
    if not committed:
        return "unknown"
    return _git("rev-parse", "--short", "HEAD") + ("" if committed == tree() else "-dirty")


def _folder(path: Path) -> bytes:
    """Return the hash of a tree object: its files and folders, sorted as git sorts them."""
    entries = {}
    for child in path.iterdir():
        if child.is_dir():
            if child.name not in MADE:
                entries[child.name + "/"] = b"40000", _folder(child)
        else:
            entries[child.name] = b"100644", _hash(b"blob", child.read_bytes())
    rows = (
        kind + b" " + name.rstrip("/").encode() + b"\0" + found
        for name, (kind, found) in sorted(entries.items(), key=lambda entry: entry[0].encode())
    )
    return _hash(b"tree", b"".join(rows))


def _hash(kind: bytes, content: bytes) -> bytes:
    head = kind + b" %d\0" % len(content)
    return hashlib.sha1(head + content, usedforsecurity=False).digest()


def _git(*words: str) -> str:
    """Return what git answers about the package's folder; nothing where it cannot."""
    command = ["git", "-C", str(HERE), *words]
    try:
        answer = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    except OSError:
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


INPUTS = "inputs"  # entry of environment.json
FILES = ("visibility.trace", "visibility.trace_devices", "agent.load")  # keys that name a file


def inputs_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of environment.json: key -> checksum of what it leads to.

    Args:
        config: every dotted key; where nothing outside is read there is no entry.
    """
    found = _checksums(config)
    return {INPUTS: found} if found else {}


def changed_input(there: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Return `key=value` of what is not what it was when a run began, or nothing.

    Args:
        there: environment.json of the run; what it has no entry of is as it was.
        config: every dotted key of the run.
    """
    known = there.get(INPUTS)
    if not isinstance(known, Mapping):
        return ""
    now = _checksums(config)
    changed = (key for key, value in now.items() if known.get(key, value) != value)
    return next((f"{key}={config[key]}" for key in changed), "")


def _checksums(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    if (data := checksum_of(str(config["data.name"]))) is not None:
        found["data.name"] = f"{data:08x}"
    for key in FILES:
        if key == "agent.load" and config["agent.save"]:
            continue  # it may be the file that the run itself writes at its end
        path = Path(str(config[key] or ""))
        if config[key] and path.is_file():
            found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
