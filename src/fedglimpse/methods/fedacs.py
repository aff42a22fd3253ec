"""FedACS, adapted to selection: clients whose updates point where the others' do.

Chen, Li and Shen, "Personalized Federated Learning with Attention-based Client Selection", 2023,
trains one model for each client, coupled by cosine similarities. This package trains one global
model, so only its attention is kept (our adaptation):

    s_i = mean over visible j of cos(delta_i, delta_j)     a = softmax(s / T)
    the K clients with the largest a, averaged with a.

Another method called FedACS (skew-based selection for industrial IoT) is unrelated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting, Stateless, top_slots
from fedglimpse.types import Choice, Method, Outcome, View


@dataclass(frozen=True)
class Options:
    """`options.*` of FedACS."""

    temperature: float = option(1.0, "T: small values sharpen the attention", above=0)


class SimilarityAttention(Stateless):
    """Chooses and weighs by mean similarity."""

    needs = frozenset({"delta_similarity"})

    def __init__(self, temperature: float, num_params: int) -> None:
        """Compare updates of `num_params` floats."""
        self.temperature = temperature
        self.num_params = num_params
        self.flops = 0  # of the coming feedback

    def select(self, view: View, k: int) -> Choice:
        """Take the most similar clients; weights sum to one."""
        similarity = view.reports["delta_similarity"].double()  # [V, V]
        attention = torch.softmax(similarity.mean(1) / self.temperature, dim=0)  # [V]
        slots = top_slots(attention, k, view.rng)
        self.flops = similarity.numel() * self.num_params
        weights = attention[slots] / attention[slots].sum()
        return Choice(slots, weights, shares=True)

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Report the server's work."""
        return {"server_flops": self.flops}


def build(setting: Setting) -> Method:
    """Return our adaptation of FedACS."""
    temperature = setting.options(Options).temperature
    return Method(SimilarityAttention(temperature, setting.num_params), WeightedDelta())


INFO = MethodInfo(
    name="fedacs",
    summary="clients whose updates agree, weighted by attention (our adaptation)",
    source="Chen et al. 2023",
    build=build,
    confidence="low",
)
