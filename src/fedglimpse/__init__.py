"""Federated learning when the server can only see some of its clients each round."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedglimpse.aggregate import TemporalWindow, WeightedDelta
    from fedglimpse.config import Config
    from fedglimpse.configure import load
    from fedglimpse.errors import UserError
    from fedglimpse.experiment import Result, run
    from fedglimpse.methods.base import Setting, Stateless, random_slots, top_slots
    from fedglimpse.types import Choice, LocalObjective, Method, Outcome, View
    from fedglimpse.version import VERSION as __version__

# Imported when first asked for: a device that only trains does not pay for the simulator.
_HOMES = {
    "aggregate": ("TemporalWindow", "WeightedDelta"),
    "config": ("Config",),
    "configure": ("load",),
    "errors": ("UserError",),
    "experiment": ("Result", "run"),
    "methods.base": ("Setting", "Stateless", "random_slots", "top_slots"),
    "types": ("Choice", "LocalObjective", "Method", "Outcome", "View"),
}

__all__ = [
    "Choice",
    "Config",
    "LocalObjective",
    "Method",
    "Outcome",
    "Result",
    "Setting",
    "Stateless",
    "TemporalWindow",
    "UserError",
    "View",
    "WeightedDelta",
    "__version__",
    "load",
    "random_slots",
    "run",
    "top_slots",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("fedglimpse.version").VERSION
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"fedglimpse.{home}"), name)
    raise AttributeError(f"module 'fedglimpse' has no attribute {name!r}")
