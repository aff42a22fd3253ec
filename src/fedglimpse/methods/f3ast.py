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
from fedglimpse.methods.base import MethodInfo, Setting, Stateless, one_of, require, top_slots
from fedglimpse.types import Choice, Method, Outcome, View

LEAST_RATE = 1e-6
RESOLUTION = 1e9  # p / r that differ by less than a part in so many are equal, up to rounding


@dataclass(frozen=True)
class Options:
    """`options.*` of F3AST."""

    mode: str = "unbiased"  # weights p / r; normalised: these divided by their sum
    beta: float = 0.001  # how fast rates follow: a memory of about 1 / beta rounds
    rate: str = "before"  # weights use the rate before or after this round
    clip: float = 0.0  # largest weight in units of 1 / K, such as 10; 0: no limit
    server_lr: float = 1.0  # factor on the step

    def __post_init__(self) -> None:
        one_of("mode", self.mode, "unbiased", "normalised")
        one_of("rate", self.rate, "before", "after")
        require(0 < self.beta < 1, "beta", self.beta, "a number between 0 and 1, such as 0.001")
        require(self.clip >= 0, "clip", self.clip, "0 for no limit, or a number such as 10")
        require(self.server_lr > 0, "server_lr", self.server_lr, "a number above 0, such as 1.0")


class RateTracker(Stateless):
    """Chooses who took part too rarely for its share of the data."""

    def __init__(self, sizes: Tensor, k: int, options: Options) -> None:
        """Start from the rates that a budget of `k` and sizes `[N]` would give."""
        self.options = options
        self.share = sizes.double() / sizes.sum()  # p [N]
        self.rates = (k * self.share).clamp(max=1)  # r [N]

    def select(self, view: View, k: int) -> Choice:
        """Choose by p^2 / r^2; the rates of all N clients move, also of those out of sight."""
        share, before = self.share[view.ids], self.rates[view.ids].clamp(min=LEAST_RATE)  # [V]
        slots = top_slots((share / before).log().mul(RESOLUTION).round(), k, view.rng)
        self.rates = self.rates * (1 - self.options.beta)
        self.rates[view.ids[slots]] += self.options.beta
        rates = before if self.options.rate == "before" else self.rates[view.ids]
        weights = share[slots] / rates[slots]
        if self.options.clip:
            weights = weights.clamp(max=self.options.clip / k)
        shares = self.options.mode == "normalised"
        if shares:
            weights = weights / weights.sum()
        return Choice(slots, self.options.server_lr * weights, shares=shares)

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Report the sum of the weights: about 1 once the rates have settled."""
        return {"weight_sum": float(outcome.weights.sum())}

    def state_dict(self) -> dict[str, Any]:
        """The rates."""
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
