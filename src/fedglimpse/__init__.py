"""Federated learning when the server can only see some of its clients each round."""

from fedglimpse.aggregate import TemporalWindow, WeightedDelta
from fedglimpse.config import Config
from fedglimpse.configure import load
from fedglimpse.errors import UserError
from fedglimpse.experiment import Result, run
from fedglimpse.methods.base import Setting, Stateless, random_slots, top_slots
from fedglimpse.types import Choice, LocalObjective, Method, Outcome, View
from fedglimpse.version import VERSION as __version__

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
