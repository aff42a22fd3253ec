"""Federated learning when the server can only see some of its clients each round.

To run: `run`, `load`, `Config`, `Result`, `Stopped`, `UserError`. To add a method: `Method` of a
selector (`Stateless`, `Choice`, `View`, `Outcome`, `random_slots`, `top_slots`) and an aggregator
(`WeightedDelta`, `TemporalWindow`, `Update`), built from a `Setting`; `LocalObjective` says what
clients minimise. Your own data is a `Dataset`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedglimpse.config.loading import load
    from fedglimpse.config.schema import Config
    from fedglimpse.data.dataset import Dataset
    from fedglimpse.errors import UserError
    from fedglimpse.federation.aggregation import TemporalWindow, WeightedDelta
    from fedglimpse.methods.base import Setting, Stateless, random_slots, top_slots
    from fedglimpse.runs.experiment import Result, Stopped, run
    from fedglimpse.types import Choice, LocalObjective, Method, Outcome, Update, View
    from fedglimpse.version import VERSION as __version__

# Imported on first use, so that a device that only trains does not load the simulator.
_MODULES = {
    "federation.aggregation": ("TemporalWindow", "WeightedDelta"),
    "config.schema": ("Config",),
    "config.loading": ("load",),
    "data.dataset": ("Dataset",),
    "errors": ("UserError",),
    "runs.experiment": ("Result", "Stopped", "run"),
    "methods.base": ("Setting", "Stateless", "random_slots", "top_slots"),
    "types": ("Choice", "LocalObjective", "Method", "Outcome", "Update", "View"),
}

__all__ = [
    "Choice",
    "Config",
    "Dataset",
    "LocalObjective",
    "Method",
    "Outcome",
    "Result",
    "Setting",
    "Stateless",
    "Stopped",
    "TemporalWindow",
    "Update",
    "UserError",
    "View",
    "WeightedDelta",
    "__version__",
    "load",
    "random_slots",
    "run",
    "top_slots",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("fedglimpse.version").VERSION
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"fedglimpse.{module}"), name)
    raise AttributeError(f"module 'fedglimpse' has no attribute {name!r}")
