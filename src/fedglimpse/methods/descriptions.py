"""What `fedglimpse methods` shows of every method.

The facts are stored in `descriptions.json`, because reading them from the methods means importing
torch and building every one. `describe.py` does that, and `python tools/update_docs.py` stores the
result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Description:
    """What `fedglimpse methods` shows of a method."""

    name: str
    summary: str
    source: str
    confidence: str
    phase: str  # pre: chosen before training; post: after
    trains: str
    uplink: str
    needs: tuple[str, ...]
    oracle: bool  # reads what no server may know: an upper reference


@cache
def descriptions() -> dict[str, Description]:
    """Return the description of every method by its name."""
    described: dict[str, Description] = {}
    for entry in json.loads(FILE.read_text(encoding="utf-8")):
        entry["needs"] = tuple(entry["needs"])
        described[entry["name"]] = Description(**entry)
    return described


def as_json(described: Iterable[Description]) -> str:
    """Return descriptions as JSON."""
    entries: list[dict[str, Any]] = [vars(description) for description in described]
    return json.dumps(entries, indent=1)
