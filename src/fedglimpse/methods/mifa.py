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
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom
from fedglimpse.types import Method, Outcome, Update


@dataclass(frozen=True)
class Options:
    """`options.*` of MIFA."""

    wait: bool = option(False, "no step until every client has been seen once")
    average: str = option(
        "seen",
        "mean over clients seen so far, or all: unseen ones count as zero",
        choices=("seen", "all"),
    )
    max_age: int = option(0, "rounds after which a memory is left out; 0: never", at_least=0)
    everyone: bool = option(False, "all visible clients train, not selection.k of them")


class UpdateMemory(WeightedDelta):
    """Averages the latest update of every client."""

    def __init__(self, num_clients: int, options: Options) -> None:
        """Start without memories of the `num_clients` that will ever train."""
        self.num_clients = num_clients
        self.options = options
        self.latest: dict[int, tuple[int, Tensor]] = {}  # client -> round, update of parameters

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        num_params = update.num_params
        for client, delta in zip(update.ids.tolist(), update.deltas, strict=True):
            self.latest[client] = (update.round_num, delta[:num_params].clone())
        if self.options.wait and len(self.latest) < self.num_clients:
            return state
        parameters = self._mean_memory(state[:num_params], update.round_num)
        buffers = update.deltas[:, num_params:].mean(0)
        return state + torch.cat([parameters, buffers])

    def _mean_memory(self, parameters: Tensor, round_num: int) -> Tensor:
        """Return the mean of the memories that are not too old, like `parameters`."""
        max_age = self.options.max_age
        total = torch.zeros_like(parameters)
        count = 0
        for stored_in, delta in self.latest.values():
            if max_age and round_num - stored_in > max_age:
                continue
            total = total + delta.to(parameters)
            count += 1
        return total / (count if self.options.average == "seen" else self.num_clients)

    def state_dict(self) -> dict[str, Any]:
        """Return all memories: as much as a model for every client seen."""
        return {"latest": dict(self.latest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the memories of `state`."""
        self.latest = dict(state["latest"])


class CostedRandom(UniformRandom):
    """Chooses at random, and reports the additions over all memories as the server's work."""

    def __init__(self, additions: int) -> None:
        """Report so many operations in every round."""
        super().__init__("uniform")
        self.additions = additions

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Report the server's work."""
        return {"server_flops": self.additions}


def build(setting: Setting) -> Method:
    """Return MIFA."""
    options = setting.options(Options)
    num_trainable = int((setting.sizes > 0).sum())
    selector = CostedRandom(num_trainable * setting.num_params)
    aggregator = UpdateMemory(num_trainable, options)
    return Method(selector, aggregator, takes_all=options.everyone)


INFO = MethodInfo(
    name="mifa",
    summary="steps along the mean of every client's latest update",
    source="Gu et al. 2021",
    build=build,
)
