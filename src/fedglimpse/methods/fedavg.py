"""FedAvg: a uniformly random choice of visible clients, their models averaged by size.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.
"""

from __future__ import annotations

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom
from fedglimpse.types import Method


def build(setting: Setting) -> Method:
    """Return FedAvg."""
    return Method(UniformRandom(), WeightedDelta())


INFO = MethodInfo(
    name="fedavg",
    summary="random clients, average weighted by size",
    source="McMahan et al. 2017",
    build=build,
)
