"""DPP: K clients whose updates point in directions as different as possible.

A control that is label-free and sees the set, not only the client: a greedy search for the mode
of a determinantal point process (Kulesza and Taskar, "Determinantal Point Processes for Machine
Learning", 2012) whose kernel is the cosine similarity of the clients' update sketches.

The first pick is drawn at random, since every single client spans the same volume.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.agent.inputs import finite
from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import MethodInfo, Setting, Stateless
from fedglimpse.methods.subsets import SubsetSearch, Value
from fedglimpse.types import Choice, Method, View

RIDGE = 1e-6  # on the diagonal: two equal updates leave the determinant above zero


def log_volume(points: Tensor) -> Value:
    """Return the value of a subset: log det of the cosine similarities of `points` `[V, D]`."""
    unit = F.normalize(points.double(), dim=1)
    has_moved = (unit.square().sum(1) > 0.5).double()  # [V] 0 where the update is zero
    similarity = (unit @ unit.T).fill_diagonal_(0)  # [V, V]
    kernel = similarity + torch.diag(has_moved + RIDGE)

    def value(subsets: Tensor) -> Tensor:
        minors = kernel[subsets[:, :, None], subsets[:, None]]  # [B, K, K]
        return torch.linalg.slogdet(minors).logabsdet

    return value


class Diverse(Stateless):
    """Chooses the subset that spans the largest volume."""

    needs = frozenset({"delta_sketch"})

    def select(self, view: View, k: int) -> Choice:
        """Add the client that widens the volume most, k times."""
        value = log_volume(finite(view.reports["delta_sketch"]))
        search = SubsetSearch(value, view.num_visible, view.rng)
        return Choice(search.greedy(min(k, view.num_visible)))


def build(setting: Setting) -> Method:
    """Return greedy DPP selection."""
    return Method(Diverse(), WeightedDelta())


INFO = MethodInfo(
    name="dpp",
    summary="K clients whose updates differ most: a control",
    source="control; after Kulesza and Taskar 2012",
    build=build,
)
