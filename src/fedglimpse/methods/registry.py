"""Finding a method by name, or a user's own by `package.module:build`."""

from __future__ import annotations

import importlib
from dataclasses import replace

from fedglimpse.aggregate import TemporalWindow, WeightedDelta
from fedglimpse.errors import UserError, nearest
from fedglimpse.methods.base import Build, MethodInfo, Setting
from fedglimpse.plugins import load_callable
from fedglimpse.types import Method

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


def info(name: str) -> MethodInfo:
    """Return the description of a built-in method."""
    if name not in MODULES:
        raise UserError(
            f"Unknown method '{name}'.{nearest(name, MODULES)} `fedglimpse methods` lists them; "
            "your own is written as package.module:build."
        )
    module = importlib.import_module(f"fedglimpse.methods.{MODULES[name]}")
    return module.INFO


def find(name: str) -> Build:
    """Return the function that builds a method, built in or the user's own."""
    return load_callable(name, "method") if ":" in name else info(name).build


def build(name: str, setting: Setting) -> Method:
    """Build a method for one lane."""
    method = find(name)(setting)
    if setting.config.options and not setting.read_options and ":" not in name:
        option = next(iter(setting.config.options))
        raise UserError(f"method={name} has no options: leave options.{option} out.")
    if not isinstance(method, Method):
        raise UserError(
            f"method={name} returned {type(method).__name__}, not a Method: return "
            "fedglimpse.Method(selector, aggregator)."
        )
    return _averaged(name, method, setting) if setting.config.aggregate.everywhere else method


def _averaged(name: str, method: Method, setting: Setting) -> Method:
    """Give a method the temporal averaging of `aggregate.*`, unless it has it already."""
    if type(method.aggregator) is TemporalWindow:
        return method
    if type(method.aggregator) is not WeightedDelta:
        raise UserError(
            f"aggregate.everywhere=true, but method={name} merges updates in its own way "
            f"({type(method.aggregator).__name__}): leave the method out, or the key."
        )
    return replace(method, aggregator=setting.temporal_window())
