"""Power-of-Choice: asks m candidates for their loss and trains the K that do worst.

Cho, Wang and Joshi, "Client Selection in Federated Learning: Convergence Analysis and
Power-of-Choice Selection Strategies", 2020. Candidates are drawn in proportion to their size.

Deviation 1: the candidates are drawn among the clients that reported, so that with m < |C| the
recorded costs are those of asking all visible clients: an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedglimpse import rng
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
    """`options.*` of Power-of-Choice."""

    candidates: int = option(
        0, "m; 0: twice selection.k; the number of visible clients: greedy", at_least=0
    )
    weights: str = option("uniform", "as in the article, or size", choices=WEIGHTS)


class HighestLoss(Stateless):
    """Chooses the candidates with the highest loss of the global model."""

    needs = frozenset({"loss"})

    def __init__(self, options: Options) -> None:
        """Choose among as many candidates as `options` say."""
        self.options = options

    def select(self, view: View, k: int) -> Choice:
        """Draw candidates without replacement, then take those with the highest loss."""
        num_candidates = max(self.options.candidates or 2 * k, k)  # m
        num_candidates = min(num_candidates, view.num_visible)
        sizes = view.sizes.double()
        candidates = rng.sample(sizes, num_candidates, view.rng)  # [m] slots
        highest = top_slots(view.reports["loss"][candidates], k, view.rng)
        slots = candidates[highest]
        return Choice(slots, weights_of(self.options.weights, slots), shares=True)


def build(setting: Setting) -> Method:
    """Return Power-of-Choice."""
    return Method(HighestLoss(setting.options(Options)), WeightedDelta())


INFO = MethodInfo(
    name="power-of-choice",
    summary="of m random candidates, the K with the highest loss",
    source="Cho et al. 2020",
    build=build,
)
