"""FedAvg with the paper's temporal averaging, and nothing else: the control of every study.

Selection is random, so whatever a method gains over this one is not due to averaging over time
(the paper's Eq. (tempAgg), `aggregate.window` and `aggregate.source`).
"""

from __future__ import annotations

from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom
from fedglimpse.types import Method


def build(setting: Setting) -> Method:
    """Return random selection with temporal averaging."""
    return Method(UniformRandom(), setting.temporal_window())


INFO = MethodInfo(
    name="fedavg-window",
    summary="FedAvg plus temporal averaging: the control of every study",
    source="control; averaging from Hou et al.",
    build=build,
)
