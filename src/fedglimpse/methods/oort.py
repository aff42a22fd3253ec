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

from fedglimpse import rng
from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting, Stateless, random_slots
from fedglimpse.types import Choice, Method, Outcome, View


@dataclass(frozen=True)
class Options:
    """`options.*` of Oort."""

    explore: float = option(0.9, "share of untried clients at the start", at_least=0, at_most=1)
    decay: float = option(0.95, "factor on that share in every round", at_least=0, at_most=1)
    explore_least: float = option(0.2, "where it stops falling", at_least=0, at_most=1)
    clip: float = option(0.98, "quantile at which utilities are cut off", at_least=0, at_most=1)
    cutoff: float = option(
        0.7, "of the last exploited score: better clients may be drawn", at_least=0, at_most=1
    )


class Oort(Stateless):
    """Exploits high utilities U_i = n_i * sqrt(mean squared example loss), explores the rest."""

    learns_from = frozenset({"rms_loss"})

    def __init__(self, sizes: Tensor, options: Options) -> None:
        """Start without a tried client, among clients of sizes `[N]`."""
        self.sizes = sizes.double()
        self.options = options
        self.utility = torch.full_like(self.sizes, math.nan)  # [N] NaN: never tried
        self.last_round = torch.zeros_like(self.sizes)  # [N] of participation, counted from 1

    def select(self, view: View, k: int) -> Choice:
        """Draw from the tried clients near the top, then untried ones by size, then any."""
        k = min(k, view.num_visible)
        is_untried = self.utility[view.ids].isnan()  # [V]
        tried = torch.where(~is_untried)[0]
        untried = torch.where(is_untried)[0]

        num_exploit = k
        if len(untried):
            exploited_share = 1 - self._explored_share(view)
            num_exploit = int(k * exploited_share)
        num_exploit = min(num_exploit, len(tried))
        slots = self._exploit(view, tried, num_exploit)

        num_explore = min(k - len(slots), len(untried))
        if num_explore:
            sizes = self.sizes[view.ids[untried]]
            drawn = rng.sample(sizes, num_explore, view.rng)
            slots = torch.cat([slots, untried[drawn]])

        shuffled = random_slots(view, view.num_visible)
        not_chosen = shuffled[~torch.isin(shuffled, slots)]
        by_preference = torch.cat([slots, not_chosen])
        return Choice(by_preference[:k])

    def _explored_share(self, view: View) -> float:
        """Return which share of the choice goes to untried clients in this round."""
        options = self.options
        round_from_1 = view.round_num + 1
        share = options.explore * options.decay**round_from_1
        return max(options.explore_least, share)

    def _exploit(self, view: View, tried: Tensor, count: int) -> Tensor:
        """Draw `count` tried slots by score, among those near the `count`-th best score."""
        if not count:
            return tried[:0]
        scores = self.scores(view.ids[tried], view.round_num + 1)
        best_first = scores.sort(descending=True).values
        next_best = best_first[min(count, len(tried) - 1)]
        eligible = scores >= self.options.cutoff * next_best
        weights = scores.clamp(min=1e-9) * eligible
        drawn = rng.sample(weights, count, view.rng)
        return tried[drawn]

    def scores(self, ids: Tensor, round_from_1: int) -> Tensor:
        """Return utilities scaled to about [0, 1] plus a bonus for long absence, for tried ids."""
        utility = self.utility[ids]
        ranked = utility.sort().values
        last_rank = len(ids) - 1
        clip_rank = min(int(len(ids) * self.options.clip), last_rank)
        lowest = 0.999 * ranked[0]
        span = (ranked[-1] - lowest).clamp(min=1e-4)
        clipped = utility.clamp(max=ranked[clip_rank])
        scaled = (clipped - lowest) / span
        absence = 0.1 * math.log(round_from_1) / self.last_round[ids]
        return scaled + absence.sqrt()

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Remember utilities, except from losses that are not finite."""
        losses = outcome.reports["rms_loss"].double()  # [K]
        usable = losses.isfinite()
        ids = outcome.selected[usable]
        self.utility[ids] = self.sizes[ids] * losses[usable]
        self.last_round[ids] = outcome.round_num + 1.0
        was_tried = ~self.utility.isnan()
        return {"tried": float(was_tried.sum())}

    def state_dict(self) -> dict[str, Any]:
        """Return utilities and when they were measured."""
        return {
            "utility": self.utility.clone(),
            "last": self.last_round.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.utility = state["utility"].clone()
        self.last_round = state["last"].clone()


def build(setting: Setting) -> Method:
    """Return Oort."""
    selector = Oort(setting.sizes, setting.options(Options))
    return Method(selector, WeightedDelta())


INFO = MethodInfo(
    name="oort",
    summary="clients with a high loss when last seen, and some never tried",
    source="Lai et al. 2021",
    build=build,
)
