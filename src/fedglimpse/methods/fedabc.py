"""FedABC: clients whose predictions agree with the others, with a bar that falls over time.

Ye, An, Wang, Yan and Carle, "FedABC: Attention-Based Client Selection for Federated Learning with
Long-Term View", 2025. Only the abstract and one sentence of Hou et al. (KL divergence between
output distributions) were available, so the rule is our reading, not the authors':

    s_i = softmax_i( -KL(mean of the other clients' predictions || P_i) )
    eligible: s_i >= theta_t * max s     theta_t = theta_0 (1 - t / T)     at most K, best first
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting, Stateless, top_slots
from fedglimpse.types import Choice, Method, Outcome, View


@dataclass(frozen=True)
class Options:
    """`options.*` of FedABC."""

    threshold: float = option(
        0.5, "theta_0, share of the best score needed in the first round", at_least=0, at_most=1
    )


def attention(predictions: Tensor) -> Tensor:
    """Return s_i `[V]` of class probabilities `[V, P, C]`; 0 for those that are not finite."""
    scores = torch.zeros(len(predictions), dtype=torch.float64)
    usable = predictions.isfinite().all(2).all(1)  # [V]
    num_usable = int(usable.sum())
    if num_usable == 1:
        scores[usable] = 1.0
    if num_usable > 1:
        client = predictions[usable].double().clamp(min=1e-12)  # [U, P, C]
        mean_of_others = (client.sum(0) - client) / (num_usable - 1)  # [U, P, C]
        log_ratio = (mean_of_others / client).log()
        divergence = (mean_of_others * log_ratio).sum(2).mean(1)  # [U]
        scores[usable] = torch.softmax(-divergence, dim=0)
    return scores


class AttentionThreshold(Stateless):
    """Chooses clients above the bar."""

    needs = frozenset({"proxy_predictions"})

    def __init__(self, num_classes: int, rounds: int, threshold: float) -> None:
        """Lower the bar from `threshold` to 0 over so many `rounds`."""
        self.num_classes = num_classes
        self.rounds = rounds
        self.threshold = threshold
        self.flops = 0  # of the coming feedback

    def select(self, view: View, k: int) -> Choice:
        """Choose the best of the eligible clients, at most k."""
        flat = view.reports["proxy_predictions"]
        scores = attention(flat.view(len(flat), -1, self.num_classes))
        bar = self.threshold * max(0.0, 1 - view.round_num / self.rounds)
        eligible = int((scores >= bar * scores.max()).sum())
        self.flops = len(flat) * flat.numel()  # |C|^2 comparisons of P * C probabilities
        slots = top_slots(scores, min(k, eligible), view.rng)
        return Choice(slots, info={"eligible": eligible})

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Report the server's work."""
        return {"server_flops": self.flops}


def build(setting: Setting) -> Method:
    """Return our reading of FedABC."""
    bar = setting.options(Options).threshold
    selector = AttentionThreshold(setting.num_classes, setting.config.rounds, bar)
    return Method(selector, WeightedDelta())


INFO = MethodInfo(
    name="fedabc",
    summary="clients whose predictions agree, with a bar that falls over time (our reading)",
    source="Ye et al. 2025, abstract only",
    build=build,
    confidence="low",
)
