"""A user's own methods: faulty ones, and ones unlike any method of the library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from small_federation import Largest
from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import Setting, UniformRandom
from fedglimpse.types import Choice, LocalObjective, Method, Outcome, View


def blocks(setting: Setting) -> Method:
    """All train one block each before the choice."""
    return Method(Largest(), WeightedDelta(), LocalObjective(block_cycle=True))


def misspelt(setting: Setting) -> Method:
    return Method(UniformRandom(), WeightedDelta(), schedule=cast(Any, "paralel"))


def distilled(setting: Setting) -> Method:
    return Method(UniformRandom(), WeightedDelta(), LocalObjective(distill=1.7))


class NoNeeds:
    def select(self, view: View, k: int) -> Choice:
        return Choice(torch.arange(k))

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        return {}


def without_needs(setting: Setting) -> Method:
    return Method(cast(Any, NoNeeds()), WeightedDelta())


class ListNeeds(Largest):
    needs = cast(Any, ["update_norm"])


def list_needs(setting: Setting) -> Method:
    return Method(ListNeeds(), WeightedDelta())


class OneStart(WeightedDelta):
    def starts(self, state: Tensor, ids: Tensor) -> Tensor:
        return state[None]


def one_start(setting: Setting) -> Method:
    return Method(UniformRandom(), OneStart())


class Silent(UniformRandom):
    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        return cast(Any, None)


def silent(setting: Setting) -> Method:
    return Method(Silent(), WeightedDelta())


class Lost(WeightedDelta):
    def step(self, state: Tensor, update: Any) -> Tensor:
        return cast(Any, None)


def lost(setting: Setting) -> Method:
    return Method(UniformRandom(), Lost())


class Talking(UniformRandom):
    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        return cast(Any, {"all": torch.ones(2)})


def talking(setting: Setting) -> Method:
    return Method(Talking(), WeightedDelta())
