"""Finding a method by name, or a user's own by `package.module:build`.

Imports no torch: a method's file, which does, is imported when the method is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from fedglimpse.errors import UserError, nearest
from fedglimpse.plugins import load_callable

if TYPE_CHECKING:
    from fedglimpse.methods.base import Build, MethodInfo

MODULES: dict[str, str] = {
    "fedavg": "fedavg",
    "fedprox": "fedprox",
    "fedavg-window": "fedavg_window",
    "edgeflow": "edgeflow",
    "ha-edgeflow": "ha_edgeflow",
    "fedawac": "fedawac",
    "f3ast": "f3ast",
    "glimpse": "glimpse",
    "mifa": "mifa",
    "herd": "herd",
    "dpp": "dpp",
    "oracle-balance": "oracle_balance",
    "power-of-choice": "power_of_choice",
    "oort": "oort",
    "fedawe": "fedawe",
    "fedabc": "fedabc",
    "fedacs": "fedacs",
    "sequential": "sequential",
    "snake": "snake",
    "favor": "favor",
    "flash-rl": "flash_rl",
    "fedagent": "fedagent",
    "feddrl": "feddrl",
    "fedppo": "fedppo",
    "palit": "palit",
}

WITH_AGENT = "glimpse"  # the method that `agent.*` belongs to, and whose agent can be pretrained


def check_name(name: str) -> None:
    """Raise UserError for a name that is no method's, or a user's own that cannot be loaded."""
    if ":" in name:
        load_callable(name, "method")
    elif name not in MODULES:
        raise UserError(
            f"Unknown method '{name}'.{nearest(name, MODULES)} `fedglimpse methods` lists them; "
            "your own is written as package.module:build.",
            key="method",
        )


def find(name: str) -> Build:
    """Return the function that builds a method, built in or the user's own."""
    if ":" in name:
        return load_callable(name, "method")
    return info(name).build


def info(name: str) -> MethodInfo:
    """Return the description of a built-in method."""
    check_name(name)
    module = importlib.import_module(f"fedglimpse.methods.{MODULES[name]}")
    return module.INFO
