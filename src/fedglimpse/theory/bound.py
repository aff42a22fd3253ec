"""The terms of Theorem 1, as the paper prints them and as they can be proved (docs/theory.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value", float, Tensor)  # one run, or many instances at once


@dataclass(frozen=True)
class Constants(Generic[Value]):
    """What the theorem is made of. Means are over rounds, largest values over all of them."""

    rounds: float  # T
    steps: float  # k, local steps of a client in a round
    lr: Value  # eta
    start: Value  # F(W^0) - F*
    gap: Value  # mean d^2
    spread: Value  # mean Gamma^2
    deviation: Value  # mean ||grad F_C - grad F_S||^2
    second_moment: Value  # G^2
    noise: Value  # sigma^2
    smoothness: Value  # L
    visible: float  # mean |C|
    ratio: float  # c = |S| / |C|
    per_selected: float  # mean 1 / |S|


@dataclass(frozen=True)
class QConstants(Generic[Value]):
    """What Lemma 4 adds for a choice by Q-values."""

    delta: Value  # mean Delta_Q
    mu: Value  # of quadratic growth
    smoothness: Value  # L_Q


@dataclass(frozen=True)
class Terms(Generic[Value]):
    """The right-hand side of the theorem, term by term."""

    start: Value  # how far the first model is from the optimum
    gap: Value  # the cost of partial visibility
    selection: Value  # the cost of the choice among the visible
    noise: Value  # of stochastic gradients
    drift: Value  # of local steps

    @property
    def total(self) -> Value:
        """The whole right-hand side."""
        return self.start + self.gap + self.selection + self.noise + self.drift


def lemma_4(spread: Value, q: QConstants[Value], ratio: float) -> Value:
    """Return the printed bound of ||grad F_C - grad F_S||^2 for a choice by Q-values."""
    by_spread = spread * q.smoothness * 2 / (q.mu * ratio)
    by_delta = q.delta * (q.smoothness + q.mu * ratio) * 4 / (q.mu * q.mu * ratio)
    return by_spread + by_delta


def printed(constants: Constants[Value], q: QConstants[Value] | None) -> Terms[Value]:
    """Return the terms as printed; without Q those of its proof before Lemma 4 is used."""
    deviation = constants.deviation
    if q is not None:
        deviation = lemma_4(constants.spread, q, constants.ratio)
    selected = constants.ratio * constants.visible
    drift = constants.smoothness * constants.steps * constants.lr
    return Terms(
        start=constants.start * 4 / (constants.lr * (constants.steps * constants.rounds)),
        gap=constants.gap * 4,
        selection=deviation * 4,
        noise=constants.smoothness * constants.lr * constants.noise * 2 / selected,
        drift=drift * drift * constants.second_moment * 4 / 3,
    )


def repaired(constants: Constants[Value]) -> Terms[Value]:
    """Return the terms that are proved in docs/theory.md, for L k eta <= 1 and any choice."""
    drift = constants.smoothness * constants.steps * constants.lr
    noise = constants.smoothness * constants.lr * constants.noise * 2
    return Terms(
        start=constants.start * 2 / (constants.lr * (constants.steps * constants.rounds)),
        gap=constants.gap * 4,
        selection=constants.deviation * 4,
        noise=noise * constants.per_selected,
        drift=drift * drift * constants.second_moment,
    )
