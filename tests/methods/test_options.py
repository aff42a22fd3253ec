"""Options of methods: values that cannot work are refused, and the option is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fakes
from fedglimpse.config.loading import resolve
from fedglimpse.fields import setting as option
from fedglimpse.methods import registry
from fedglimpse.methods.base import Setting
from mistakes import mistake

IMPOSSIBLE: list[tuple[str, str, Any]] = [
    ("f3ast", "beta", 1.5),
    ("f3ast", "bet", 0.5),
    ("f3ast", "mode", "x"),
    ("favor", "base", 1.0),
    ("favor", "gamma", 1.5),
    ("favor", "batch", 0),
    ("favor", "buffer", 1),
    ("favor", "lr", 0.0),
    ("favor", "features", -1),
    ("fedabc", "threshold", 1.5),
    ("fedacs", "temperature", 0.0),
    ("fedagent", "distill", 1.5),
    ("fedagent", "temperature", 0.0),
    ("fedawac", "mode", "x"),
    ("fedawac", "map", "x"),
    ("fedawac", "history", "x"),
    ("fedawac", "window", 0),
    ("fedawac", "temperature", 0.0),
    ("fedawe", "clip", -1.0),
    ("feddrl", "filter", -1.0),
    ("feddrl", "reward", "gold"),
    ("fedppo", "reward", "gold"),
    ("fedppo", "clip", 0.0),
    ("fedppo", "horizon", 0),
    ("fedppo", "gamma", 2.0),
    ("flash-rl", "memory", 1.5),
    ("ha-edgeflow", "weights", "sizes"),
    ("ha-edgeflow", "divisor", -1),
    ("ha-edgeflow", "global_l2", 3),
    ("mifa", "max_age", -1),
    ("oort", "explore", 2.0),
    ("oracle-balance", "allow_oracle", False),
    ("palit", "epsilon_decay", 0.0),
    ("power-of-choice", "candidates", -1),
    ("snake", "distill", -0.5),
]


@pytest.mark.parametrize(("method", "option", "value"), IMPOSSIBLE)
def test_impossible_values_are_refused(method: str, option: str, value: Any) -> None:
    with mistake(f"options.{option}"):
        fakes.build(method, **{f"options__{option}": value})


@pytest.mark.parametrize("method", ["fedavg", "herd", "dpp"])
def test_a_method_without_options_refuses_any(method: str) -> None:
    with mistake("options.rate"):
        fakes.build(method, options__rate=0.5)


def test_an_unknown_method_is_refused() -> None:
    with mistake("method"):
        registry.find("fedavgg")


@dataclass(frozen=True)
class OwnOptions:
    rate: float = option(1.0, "of anything", above=0)
    plain: int = 3


def test_options_of_a_users_method_may_declare_ranges() -> None:
    def read(rate: float) -> OwnOptions:
        config = resolve({"options.rate": rate, "options.plain": 4})
        setting = Setting(config, 0, torch.full((4,), 10), num_classes=2, num_params=5)
        return setting.options(OwnOptions)

    assert read(0.5) == OwnOptions(0.5, 4)
    with mistake("options.rate"):
        read(-0.5)
