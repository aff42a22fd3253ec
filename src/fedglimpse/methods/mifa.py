"""MIFA: remembers every client's latest update and steps along the mean of all memories.

Gu, Huang, Zhang and Huang, "Fast Federated Learning in the Presence of Arbitrary Device
Unavailability", 2021, and the code at github.com/hmgxr128/MIFA_code.

Deviations: 1. K random visible clients train (article: all available; `options.everyone`).
2. Memories are updates W_i - W, not gradients (W - W_i) / lr: the same for a constant learning
rate, and sound for any optimizer. 3. The mean is over clients seen so far (`options.average`).
4. Buffers (BatchNorm's statistics) are averaged over this round's clients only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom, one_of, require
from fedglimpse.types import Method, Outcome, Update


@dataclass(frozen=True)
class Options:
    """`options.*` of MIFA."""

    wait: bool = False  # no step until every client has been seen once
    average: str = "seen"  # mean over clients seen so far, or all: unseen ones count as zero
    max_age: int = 0  # rounds after which a memory is left out; 0: never
    everyone: bool = False  # all visible clients train, not selection.k of them

    def __post_init__(self) -> None:
        one_of("average", self.average, "seen", "all")
        require(self.max_age >= 0, "max_age", self.max_age, "0 for no limit, or some rounds")


class Memory(WeightedDelta):
    """Averages the latest update of every client."""

    def __init__(self, num_clients: int, options: Options) -> None:
        """Start without memories of the `num_clients` that will ever train."""
        self.num_clients, self.options = num_clients, options
        self.latest: dict[int, tuple[int, Tensor]] = {}  # client -> round, update of parameters

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        options, cut, now = self.options, update.num_params, update.round_num
        for client, delta in zip(update.ids.tolist(), update.deltas, strict=True):
            self.latest[client] = (now, delta[:cut].clone())
        if options.wait and len(self.latest) < self.num_clients:
            return state
        total, count = torch.zeros_like(state[:cut]), 0
        for when, delta in self.latest.values():
            if not options.max_age or now - when <= options.max_age:
                total, count = total + delta.to(state), count + 1
        mean = total / (count if options.average == "seen" else self.num_clients)
        return state + torch.cat([mean, update.deltas[:, cut:].mean(0)])

    def state_dict(self) -> dict[str, Any]:
        """All memories: as much as a model for every client seen."""
        return {"latest": dict(self.latest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the memories of `state`."""
        self.latest = dict(state["latest"])


class Accountable(UniformRandom):
    """Random choice that books the additions over all memories."""

    def __init__(self, additions: int) -> None:
        """Book so many operations in every round."""
        super().__init__("uniform")
        self.additions = additions

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Learn nothing; report the server's work."""
        return {"server_flops": self.additions}


def build(setting: Setting) -> Method:
    """Return MIFA."""
    options, usable = setting.options(Options), int((setting.sizes > 0).sum())
    selector = Accountable(usable * setting.num_params)
    return Method(selector, Memory(usable, options), takes_all=options.everyone)


INFO = MethodInfo(
    name="mifa",
    summary="steps along the mean of every client's latest update",
    source="Gu et al. 2021",
    build=build,
)
