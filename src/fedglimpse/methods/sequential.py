"""Sequential federated learning: the model visits K clients in turn, and nothing is averaged.

Each client trains from the previous one's result, in random order, and the last result is the next
global model: W^{t+1} = W_{i_K}. The baseline behind Snake Learning and EdgeFLow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import MethodInfo, Setting, Stateless, random_slots
from fedglimpse.types import Choice, Method, Update, View


class RandomOrder(Stateless):
    """Chooses k visible clients, to be visited in the order of the slots."""

    def select(self, view: View, k: int) -> Choice:
        """Draw from the round's generator; no update is scaled."""
        slots = random_slots(view, k)
        return Choice(slots, torch.ones(len(slots), dtype=torch.float64))


class LastModel(WeightedDelta):
    """The last client's model is the next global model."""

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        return update.starts[-1] + update.deltas[-1]


def build(setting: Setting) -> Method:
    """Return sequential learning."""
    return Method(RandomOrder(), LastModel(), schedule="sequential")


INFO = MethodInfo(
    name="sequential",
    summary="the model visits K clients in turn; nothing is averaged",
    source="sequential federated learning",
    build=build,
)
