"""EdgeFLow: the model moves from cluster to cluster, and all clients of a cluster train.

Shi, Hou, Fan and Letaief, "EdgeFLow: Serverless Federated Learning via Sequential Model Migration
in Edge Networks", 2026, and the code at github.com/hqj-les30/HA-EdgeFLow.

The clusters are the visibility: `visibility.kind=mobile` visits a random cluster in each round,
`cyclic` visits them in turn. `selection.k` is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import WEIGHTS, MethodInfo, Setting, Stateless, weights_of
from fedglimpse.types import Choice, Method, View


@dataclass(frozen=True)
class Options:
    """`options.*` of EdgeFLow."""

    weights: str = option("size", "size, or uniform as in the authors' code", choices=WEIGHTS)


class Everyone(Stateless):
    """Chooses all visible clients."""

    def __init__(self, weights: str = "size") -> None:
        """Average by `size` or `uniform`."""
        self.weights = weights

    def select(self, view: View, k: int) -> Choice:
        """Take every slot, whatever `k`."""
        slots = torch.arange(view.num_visible)
        return Choice(slots, weights_of(self.weights, slots), shares=True)


def build(setting: Setting) -> Method:
    """Return EdgeFLow."""
    options = setting.options(Options)
    return Method(Everyone(options.weights), WeightedDelta(), takes_all=True)


INFO = MethodInfo(
    name="edgeflow",
    summary="every visible client trains and counts",
    source="Shi et al. 2026",
    build=build,
)
