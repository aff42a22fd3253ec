"""Small JSON files of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedglimpse.errors import UserError


def read_json(path: Path) -> dict[str, Any]:
    """Return the table in a file, an empty one where there is no file; raises UserError."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = f" ({error.strerror})" if isinstance(error, OSError) else ""
        raise UserError(f"{path} is not valid JSON{why}: restore or delete it.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no table of names and values: restore or delete it.")
    return found
