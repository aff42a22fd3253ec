"""Herding: the K clients whose mean update is nearest to the mean update of all visible ones.

A control that is label-free and sees the set, not only the client. It minimises the distance
between the aggregate of the chosen and that of all visible clients, the term that the theorem of
Hou et al. charges to selection, measured on sketches of the updates.

Our reading: both means are weighted by client size, like the average that follows.
"""

from __future__ import annotations

from torch import Tensor

from fedglimpse.agent.inputs import finite
from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import MethodInfo, Setting, Stateless
from fedglimpse.methods.subsets import SubsetSearch, Value
from fedglimpse.types import Choice, Method, View


def nearness(points: Tensor, sizes: Tensor) -> Value:
    """Return the value of a subset: minus the squared distance of its mean to the mean of all.

    Args:
        points: sketches.  # [V, D]
        sizes: how much each counts.  # [V]
    """
    points = points.double() - points.double().mean(0)  # distances stay, rounding shrinks
    mass = sizes.double()  # [V]
    goal = mass @ points / mass.sum()  # [D]

    def value(subsets: Tensor) -> Tensor:
        subset_mass = mass[subsets]  # [B, K]
        share = subset_mass / subset_mass.sum(1, keepdim=True)
        means = (share[:, None] @ points[subsets])[:, 0]  # [B, D]
        return -(means - goal).square().sum(1)

    return value


class Herd(Stateless):
    """Chooses the subset whose mean update is nearest to that of all visible clients."""

    needs = frozenset({"delta_sketch"})

    def select(self, view: View, k: int) -> Choice:
        """Search for the nearest mean."""
        value = nearness(finite(view.reports["delta_sketch"]), view.sizes)
        search = SubsetSearch(value, view.num_visible, view.rng)
        return Choice(search.best(k))


def build(setting: Setting) -> Method:
    """Return herding."""
    return Method(Herd(), WeightedDelta())


INFO = MethodInfo(
    name="herd",
    summary="the K clients whose mean update is nearest to that of all visible: a control",
    source="control; herding after Welling 2009",
    build=build,
)
