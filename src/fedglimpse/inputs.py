"""What a run reads besides its configuration and code: whether it is still what it was.

A user's own data, the files of a visibility trace and a policy that was loaded are noted in
environment.json as checksums, so that no run goes on with others in the middle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedglimpse.data.own import checksum_of

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
