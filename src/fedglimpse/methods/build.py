"""Building a method for a run, and what a built method reads."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.federation.aggregation import TemporalWindow, WeightedDelta
from fedglimpse.federation.reports import ORACLES, PERMISSION, check_permission
from fedglimpse.methods.base import Setting
from fedglimpse.methods.registry import find, info
from fedglimpse.types import Method


def build_method(name: str, setting: Setting) -> Method:
    """Build a method for one lane."""
    method = find(name)(setting)
    if setting.own_options and not setting.read_options and ":" not in name:
        option = next(iter(setting.own_options))
        raise UserError(
            f"method={name} has no options: leave options.{option} out.", key=f"options.{option}"
        )
    if not isinstance(method, Method):
        raise UserError(
            f"method={name} returned {type(method).__name__}, not a Method: return "
            "fedglimpse.Method(selector, aggregator).",
            key="method",
        )
    check_permission(f"method={name}", reads(method), setting.config.options)
    if setting.config.aggregate.everywhere:
        return _averaged(name, method, setting)
    return method


def is_oracle(name: str) -> bool:
    """True for a method that reads what no server may know, with its default options."""
    options = {} if ":" in name else info(name).example_options
    config = Config(method=name, options={**options, PERMISSION: True})
    sizes = torch.full((30,), 10)
    setting = Setting(config, seed=0, sizes=sizes, num_classes=10, num_params=100)
    return not ORACLES.isdisjoint(reads(build_method(name, setting)))


def reads(method: Method) -> frozenset[str]:
    """Return all reports that a method asks for; what is not a set of names is left out."""
    declared = [
        getattr(method.selector, "needs", None),
        getattr(method.selector, "learns_from", None),
        getattr(method.aggregator, "needs", None),
    ]
    names: set[str] = set()
    for needs in declared:
        if isinstance(needs, frozenset):
            names |= needs
    return frozenset(names)


def _averaged(name: str, method: Method, setting: Setting) -> Method:
    """Give a method the temporal averaging of `aggregate.*`, unless it has it already."""
    if type(method.aggregator) is TemporalWindow:
        return method
    if type(method.aggregator) is not WeightedDelta:
        raise UserError(
            f"aggregate.everywhere=true, but method={name} merges updates in its own way "
            f"({type(method.aggregator).__name__}): leave the method out, or the key.",
            key="aggregate.everywhere",
        )
    return replace(method, aggregator=setting.temporal_window())
