"""HA-EdgeFLow: chooses the clients whose gradient is nearest to the server's proxy gradient.

Shi, Hou, Fan and Letaief, "EdgeFLow", 2026; the heterogeneity-aware rule is in the code at
github.com/hqj-les30/HA-EdgeFLow. Both gradients are taken at the global model W^t before any
training, so only the chosen train; lambda_i = sum over tensors of ||g_i - g_proxy||.

Deviations: 1. weights are the clients' sizes (code: uniform, `options.weights`). 2. K clients are
kept (code: |C| / l, `options.divisor`). 3. gradients of both sides in evaluation mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import (
    WEIGHTS,
    MethodInfo,
    Setting,
    Stateless,
    top_slots,
    weights_of,
)
from fedglimpse.types import Choice, Method, View


@dataclass(frozen=True)
class Options:
    """`options.*` of HA-EdgeFLow."""

    weights: str = option("size", "size, or uniform as in the authors' code", choices=WEIGHTS)
    global_l2: bool = option(False, "one norm over all parameters instead of a sum over tensors")
    divisor: int = option(
        0, "l of the authors' code: keep |C| / l clients; 0: keep selection.k", at_least=0
    )


class NearestGradient(Stateless):
    """Chooses the clients with the smallest gradient distance."""

    def __init__(self, options: Options) -> None:
        """Ask for the distance that the options name."""
        self.options = options
        self.report = "gradient_distance_l2" if options.global_l2 else "gradient_distance"
        self.needs = frozenset({self.report})

    def select(self, view: View, k: int) -> Choice:
        """Keep the nearest."""
        if self.options.divisor:
            k = max(1, view.num_visible // self.options.divisor)
        slots = top_slots(-view.reports[self.report], k, view.rng)
        return Choice(slots, weights_of(self.options.weights, slots), shares=True)


def build(setting: Setting) -> Method:
    """Return HA-EdgeFLow."""
    options = setting.options(Options)
    return Method(NearestGradient(options), WeightedDelta(), takes_all=options.divisor > 0)


INFO = MethodInfo(
    name="ha-edgeflow",
    summary="clients whose gradient is nearest to the proxy gradient",
    source="Shi et al. 2026",
    build=build,
)
