"""F3AST: tracks how often each client takes part, and corrects the average for it.

Ribero, Vikalo and de Veciana, "Federated Learning Under Intermittent Client Availability and
Time-Varying Communication Constraints", 2022, and the code at github.com/mriberodiaz/f3ast.
With shares p_i = n_i / sum n and a running rate r_i, it chooses the visible clients with the
largest p_i^2 / r_i^2, the steepest fall of H(r) = sum p_i^2 / r_i, and weighs updates by p_i / r_i.

Deviations: 1. r starts at min(1, K p_i), an inclusion probability (code: p_i). 2. The weighted sum
is not divided by K (code: it is, so that steps shrink over time). 3. Weights use the rate before
the round (code: after, `options.rate`). 4. Only visible clients can be chosen (code: also others).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting, Stateless, top_slots
from fedglimpse.types import Choice, Method, Outcome, View

LEAST_RATE = 1e-6
RESOLUTION = 1e9  # p / r that differ by less than a part in so many are equal, up to rounding


@dataclass(frozen=True)
class Options:
    """`options.*` of F3AST."""

    mode: str = option(
        "unbiased",
        "weights p / r; normalised: these divided by their sum",
        choices=("unbiased", "normalised"),
    )
    beta: float = option(
        0.001, "how fast rates follow: a memory of about 1 / beta rounds", above=0, below=1
    )
    rate: str = option(
        "before", "weights use the rate before or after this round", choices=("before", "after")
    )
    clip: float = option(
        0.0, "largest weight in units of 1 / K, such as 10; 0: no limit", at_least=0
    )
    server_lr: float = option(1.0, "factor on the step", above=0)


class RateTracker(Stateless):
    """Chooses the clients that took part too rarely for their share of the data."""

    def __init__(self, sizes: Tensor, k: int, options: Options) -> None:
        """Start from the rates that a budget of `k` and sizes `[N]` would give."""
        self.options = options
        self.share = sizes.double() / sizes.sum()  # p [N]
        self.rates = (k * self.share).clamp(max=1)  # r [N]

    def select(self, view: View, k: int) -> Choice:
        """Choose by p^2 / r^2; the rates of all N clients move, also of invisible ones."""
        share = self.share[view.ids]  # [V]
        rates_before = self.rates[view.ids].clamp(min=LEAST_RATE)  # [V]
        scores = (share / rates_before).log().mul(RESOLUTION).round()
        slots = top_slots(scores, k, view.rng)
        self.rates = self.rates * (1 - self.options.beta)
        self.rates[view.ids[slots]] += self.options.beta

        rates = rates_before
        if self.options.rate == "after":
            rates = self.rates[view.ids]
        weights = share[slots] / rates[slots]
        if self.options.clip:
            weights = weights.clamp(max=self.options.clip / k)
        normalised = self.options.mode == "normalised"
        if normalised:
            weights = weights / weights.sum()
        return Choice(slots, self.options.server_lr * weights, shares=normalised)

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Report the sum of the weights: about 1 once the rates have settled."""
        return {"weight_sum": float(outcome.weights.sum())}

    def state_dict(self) -> dict[str, Any]:
        """Return the rates."""
        return {"rates": self.rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rates of `state`."""
        self.rates = state["rates"]


def build(setting: Setting) -> Method:
    """Return F3AST; preset `released` normalises its weights, as the authors' runs most likely."""
    options = setting.options(Options, presets={"released": {"mode": "normalised"}})
    return Method(RateTracker(setting.sizes, setting.config.selection.k, options), WeightedDelta())


INFO = MethodInfo(
    name="f3ast",
    summary="clients that took part too rarely, weighted against availability bias",
    source="Ribero et al. 2022",
    build=build,
)
