"""FedProx: FedAvg whose clients are pulled towards the model they were sent.

Li et al., "Federated Optimization in Heterogeneous Networks", 2020. A client minimises
F_i(w) + mu/2 * ||w - W^t||^2 over its trainable parameters.

Deviation 1: with `local.proximal_squared=false` the penalty is mu * sum of the tensors' plain
norms, as in the code of the paper this package follows (its mu is 0.0005).
"""

from __future__ import annotations

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom
from fedglimpse.types import LocalObjective, Method


def build(setting: Setting) -> Method:
    """Return FedProx with `local.proximal_mu`."""
    local = setting.config.local
    objective = LocalObjective(local.proximal_mu, local.proximal_squared)
    return Method(UniformRandom(), WeightedDelta(), objective)


INFO = MethodInfo(
    name="fedprox",
    summary="FedAvg with a proximal term in the local loss",
    source="Li et al. 2020",
    build=build,
)
