"""The vocabulary of a round: what a server sees, whom it chooses, and the result.

Letters used for shapes everywhere in this package:

    R lanes (independent runs side by side)   N clients in the population
    V visible clients                         K chosen clients
    J jobs (clients that train, all lanes)    C classes
    D floats of a sketch                      d floats of a model state
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
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
    shares: bool = False  # weights are shares: those of failed updates go to the other clients

    def weights_at(self, positions: Sequence[int]) -> Tensor | None:
        """Return the weights `[n]` of the chosen clients whose updates can be used.

        Args:
            positions: of these clients in `slots`.
        """
        if self.weights is None:
            return None
        weights = self.weights[list(positions)].double()
        nothing_failed = len(weights) == len(self.weights)
        if not self.shares or nothing_failed or not weights.sum() > 0:
            return weights
        return weights * (self.weights.double().sum() / weights.sum())


@dataclass(frozen=True)
class Outcome:
    """The result of a choice, after aggregation and evaluation on the proxy set."""

    round_num: int
    selected: Tensor  # [K] ids that were chosen and whose update was used
    reward: float  # smoothed proxy score, the paper's Eq. (reward)
    score: float  # this round's proxy score alone: macro-F1 or accuracy
    per_class: Tensor  # [C] proxy F1 of each class, unsmoothed
    reward_per_class: Tensor  # [C] smoothed like `reward`
    weights: Tensor  # [K] coefficients that were applied
    reports: Mapping[str, Tensor]  # `Selector.learns_from`, of the selected: name -> [K] or [K, D]


def _recorded(kind: str, meaning: str, **default: Any) -> Any:
    """Declare a field of `RoundRecord`; `kind` says what `from_json` accepts."""
    return field(metadata={"kind": kind, "meaning": meaning}, **default)


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round of one lane: a line of `rounds.jsonl`, with its fields in this order.

    Simulated runs and runs on devices write the same record. Numbers that are not finite are null
    in the file. Fields whose default is None are left out of it where they are None, except for
    scores and losses.
    """

    lane: int = _recorded("count", "position of the seed in `seeds`")
    seed: int = _recorded("integer", "seed of the lane")
    round: int = _recorded("count", "number of the round, from 0")
    visible: Sequence[int] = _recorded("clients", "ids that could be seen (on devices: with data)")
    selected: Sequence[int] = _recorded("clients", "ids whose update was used")
    rejected: Sequence[int] = _recorded("clients", "ids whose update was not finite")
    weights: Sequence[float] = _recorded("any", "coefficients of their updates", default=())
    accuracy: float | None = _recorded("score", "on the test set; null in rounds without a test")
    macro_f1: float | None = _recorded("score", "mean F1 of the classes, on the test set")
    per_class_f1: Sequence[float] | None = _recorded(
        "any", "F1 of each class, on the test set", default=None
    )
    loss: float | None = _recorded("any", "mean loss on the test set", default=None)
    train_loss: float | None = _recorded("any", "mean over the clients that trained", default=None)
    reward: float | None = _recorded("score", "smoothed proxy score")
    extra: Mapping[str, Any] = _recorded(
        "extra", "anything else: what the method logs, explained on its page", default_factory=dict
    )
    uplink_bytes: int = _recorded("amount", "sent by clients in this round")
    downlink_bytes: int = _recorded("amount", "received by clients in this round")
    client_flops: int = _recorded("amount", "computed by clients in this round")
    server_flops: int = _recorded("amount", "computed by the server in this round")
    oracle: bool | None = _recorded(
        "optional", "true where the method reads what no server may know", default=None
    )
    failed: Mapping[str, str] | None = _recorded(
        "optional", "Flower runs: clients whose answer was refused or missing, why", default=None
    )
    received_bytes_chosen: int | None = _recorded(
        "optional", "Flower runs: bytes that reached the server from chosen clients", default=None
    )
    received_bytes_others: int | None = _recorded(
        "optional", "Flower runs: bytes that reached the server from others", default=None
    )
    seconds: float | None = _recorded(
        "amount", "wall time of the round divided by the number of lanes", default=None
    )

    def to_json(self) -> dict[str, Any]:
        """Return the line of `rounds.jsonl` as a dictionary; `extra` becomes entries of its own."""
        line: dict[str, Any] = {}
        for name in RECORD_FIELDS:
            value = getattr(self, name)
            if name == "extra":
                line.update(value)
            elif value is not None or name not in _LEFT_OUT:
                line[name] = value
        return line

    @staticmethod
    def from_json(line: object) -> RoundRecord:
        """Read a line of `rounds.jsonl`; ValueError says which field is wrong."""
        if not isinstance(line, dict):
            raise ValueError("it is no JSON table")
        for name, kind in RECORD_FIELDS.items():
            is_right = _CHECKS.get(kind)
            if is_right is None:
                continue
            if name not in line:
                raise ValueError(f"it has no `{name}`")
            if not is_right(line[name]):
                shown = "no list of client numbers" if kind == "clients" else repr(line[name])
                raise ValueError(f"its `{name}` is {shown}")
        measured = {name: line[name] for name in RECORD_FIELDS if name in line and name != "extra"}
        extra = {name: value for name, value in line.items() if name not in measured}
        return RoundRecord(**measured, extra=extra)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and isfinite(value)


_CHECKS = {
    "integer": lambda value: type(value) is int,
    "count": _is_count,
    "clients": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "score": lambda value: value is None or _is_number(value),
    "amount": _is_finite,
}

RECORD_FIELDS: Mapping[str, str] = {f.name: f.metadata["kind"] for f in fields(RoundRecord)}
_LEFT_OUT = {"seconds"} | {name for name, kind in RECORD_FIELDS.items() if kind == "optional"}


class Selector(Protocol):
    """Chooses among visible clients and may learn from the result.

    What it needs and learns from must stay the same for the whole run.

    Attributes:
        needs: names of `reports.CATALOGUE` that must be in the view. Any report of phase
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
    starts: Tensor  # [K, d] the states they trained from; the global state, or `Aggregator.starts`
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
