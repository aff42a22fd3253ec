"""The vocabulary of a round: what a server sees, what it answers, what came of it.

Letters used for shapes everywhere in this package:

    R lanes (independent runs side by side)   N clients in the population
    V visible clients                         K chosen clients
    J jobs (clients that train, all lanes)    C classes
    D floats of a sketch                      d floats of a model state
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class View:
    """The glimpse: everything a selector may know when it chooses.

    `reports` holds exactly the client reports listed in `Selector.needs`, `server` the
    server-side ones. A selector must not change any tensor in here.
    """

    round_num: int
    ids: Tensor  # [V] dense client ids, int64, on the CPU
    sizes: Tensor  # [V] local examples, int64, on the CPU
    reports: Mapping[str, Tensor]  # name -> [V] or [V, D], float32, on the CPU
    server: Mapping[str, Tensor]  # "global_sketch" [D], ...
    rng: torch.Generator  # for this (seed, round) only

    @property
    def num_visible(self) -> int:
        """V, the number of visible clients."""
        return self.ids.shape[0]


@dataclass(frozen=True)
class Choice:
    """A selector's answer: positions in `View.ids`, and how much each delta counts."""

    slots: Tensor  # [K] positions in view.ids, distinct, int64
    weights: Tensor | None = None  # [K] coefficients on deltas; None -> sizes / sum of sizes
    info: Mapping[str, Any] = field(default_factory=dict)  # recorded as it is
    shares: bool = False  # weights are shares: where an update fails, the others get its part

    def weights_at(self, places: Sequence[int]) -> Tensor | None:
        """Return the weights of those whose updates can be used `[n]`, by their places in K."""
        if self.weights is None:
            return None
        kept = self.weights[list(places)].double()
        if not self.shares or len(kept) == len(self.weights) or not kept.sum() > 0:
            return kept
        return kept * (self.weights.double().sum() / kept.sum())


@dataclass(frozen=True)
class Outcome:
    """What came of a choice, after aggregation and evaluation on the proxy set."""

    round_num: int
    selected: Tensor  # [K] ids that were chosen and whose update was used
    reward: float  # smoothed proxy score, the paper's Eq. (reward)
    score: float  # this round's proxy score alone: macro-F1 or accuracy
    per_class: Tensor  # [C] proxy F1 of each class, unsmoothed
    reward_per_class: Tensor  # [C] smoothed like `reward`
    weights: Tensor  # [K] coefficients that were applied
    reports: Mapping[str, Tensor]  # `Selector.learns_from`, of the selected: name -> [K] or [K, D]


class Selector(Protocol):
    """Chooses among visible clients and may learn from what happened.

    Attributes:
        needs: names of `needs.CATALOGUE` that must be in the view. Any report of phase
            "trained" makes all visible clients train before the choice.
        learns_from: reports that only the chosen clients send, with their update; they
            arrive in `Outcome.reports`.
    """

    needs: frozenset[str]
    learns_from: frozenset[str]

    def select(self, view: View, k: int) -> Choice:
        """Choose at most `k` distinct slots of the view."""

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Learn from the round; returns metrics to record (see docs for names).

        On a GPU the clients of the next round may be training already: what changes here is seen
        by the next `select`, not by who trains for it and from where.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue: tensors and plain values only."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""


class Visibility(Protocol):
    """Who can be seen in a round. A pure function of (seed, round_num)."""

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the ids of the visible clients `[V]`: int64, sorted, at least one."""


@dataclass(frozen=True)
class Update:
    """What the chosen clients of one round uploaded, on the training device."""

    round_num: int
    ids: Tensor  # [K] on the CPU
    sizes: Tensor  # [K] local examples, on the CPU
    starts: Tensor  # [K, d] the states they trained from; the global state unless said otherwise
    deltas: Tensor  # [K, d] trained states minus `starts`
    weights: Tensor  # [K] coefficients of the choice
    num_params: int  # the first floats are parameters, the rest are buffers
    reports: Mapping[str, Tensor]  # `Aggregator.needs`: name -> [K, ...], on the CPU


class Aggregator(Protocol):
    """Turns uploaded updates into the next global state. One object per lane.

    Attributes:
        needs: reports about the uploaded models that must be in `Update.reports`.
        applied: coefficients of the last step `[K]`, where it set its own; None: the choice's.
    """

    needs: frozenset[str]
    applied: Tensor | None

    def starts(self, state: Tensor, ids: Tensor) -> Tensor:
        """Return the states these clients train from `[K, d]`; usually `state` for all."""

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`; must not change its arguments."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""


@dataclass(frozen=True)
class LocalObjective:
    """What a client minimises besides its own loss."""

    proximal_mu: float = 0.0  # weight of the pull towards the broadcast model
    proximal_squared: bool = True  # False: the release's sum of unsquared norms per tensor
    distill: float = 0.0  # share of the loss that is distillation from the received model
    temperature: float = 2.0  # of the distillation
    block_cycle: bool = False  # train one block of layers at a time, the others stay frozen


@dataclass(frozen=True)
class Method:
    """A way to run a federation: who is chosen, how updates merge, what clients minimise."""

    selector: Selector
    aggregator: Aggregator
    objective: LocalObjective = LocalObjective()
    schedule: Literal["parallel", "sequential"] = "parallel"  # sequential: each from the last
    takes_all: bool = False  # may choose every visible client, whatever `selection.k` says

    def budget(self, k: int, visible: int) -> int:
        """Return how many of the visible clients may be chosen: `k`, or all."""
        return visible if self.takes_all else k
