"""Oort: clients whose loss promised most last time, with a share for clients never tried.

Lai, Zhu, Madhyastha and Chowdhury, "Oort: Efficient Federated Learning via Guided Participant
Selection", 2021; github.com/SymbioticLab/Oort. Deviations: docs/methods/oort.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import MethodInfo, Setting, Stateless, random_slots, require
from fedglimpse.types import Choice, Method, Outcome, View


@dataclass(frozen=True)
class Options:
    """`options.*` of Oort, all from 0 to 1."""

    explore: float = 0.9  # share of untried clients at the start
    decay: float = 0.95  # factor on that share in every round
    explore_least: float = 0.2  # where it stops falling
    clip: float = 0.98  # quantile at which utilities are cut off
    cutoff: float = 0.7  # of the last exploited score: better clients may be drawn instead

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(0 <= value <= 1, name, value, "a number from 0 to 1")


class Oort(Stateless):
    """Exploits high utilities U_i = n_i * sqrt(mean squared example loss), explores the rest."""

    learns_from = frozenset({"rms_loss"})

    def __init__(self, sizes: Tensor, options: Options) -> None:
        """Start with nobody tried, among clients of sizes `[N]`."""
        self.sizes, self.options = sizes.double(), options
        self.utility = torch.full_like(self.sizes, math.nan)  # [N] NaN: never tried
        self.last = torch.zeros_like(self.sizes)  # [N] round of the last participation, from 1

    def scores(self, ids: Tensor, now: int) -> Tensor:
        """Return utilities scaled to about [0, 1] plus a bonus for long absence, for tried ids."""
        utility, ranked = self.utility[ids], self.utility[ids].sort().values
        top, low = ranked[min(int(len(ids) * self.options.clip), len(ids) - 1)], 0.999 * ranked[0]
        scaled = (utility.clamp(max=top) - low) / (ranked[-1] - low).clamp(min=1e-4)
        return scaled + (0.1 * math.log(now) / self.last[ids]).sqrt()

    def select(self, view: View, k: int) -> Choice:
        """Draw from the tried clients near the top, then untried ones by size, then any."""
        now, k = view.round_num + 1, min(k, view.num_visible)
        new = self.utility[view.ids].isnan()  # [V]
        tried, untried = torch.where(~new)[0], torch.where(new)[0]
        share = max(self.options.explore_least, self.options.explore * self.options.decay**now)
        slots = tried[:0]
        if exploit := min(int(k * (1 - share)) if len(untried) else k, len(tried)):
            scores = self.scores(view.ids[tried], now)
            bar = scores.sort(descending=True).values[min(exploit, len(tried) - 1)]
            worth = scores.clamp(min=1e-9) * (scores >= self.options.cutoff * bar)
            slots = tried[torch.multinomial(worth, exploit, generator=view.rng)]
        if explore := min(k - len(slots), len(untried)):
            drawn = torch.multinomial(self.sizes[view.ids[untried]], explore, generator=view.rng)
            slots = torch.cat([slots, untried[drawn]])
        rest = random_slots(view, view.num_visible)
        return Choice(torch.cat([slots, rest[~torch.isin(rest, slots)]])[:k])

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Remember utilities; a loss that is not finite says nothing."""
        losses = outcome.reports["rms_loss"].double()  # [K]
        ids, losses = outcome.selected[losses.isfinite()], losses[losses.isfinite()]
        self.utility[ids] = self.sizes[ids] * losses
        self.last[ids] = outcome.round_num + 1.0
        return {"tried": float((~self.utility.isnan()).sum())}

    def state_dict(self) -> dict[str, Any]:
        """Utilities and when they were measured."""
        return {"utility": self.utility.clone(), "last": self.last.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.utility, self.last = state["utility"].clone(), state["last"].clone()


def build(setting: Setting) -> Method:
    """Return Oort."""
    return Method(Oort(setting.sizes, setting.options(Options)), WeightedDelta())


INFO = MethodInfo(
    name="oort",
    summary="clients with a high loss when last seen, and some never tried",
    source="Lai et al. 2021",
    build=build,
)
