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
    gap: Value  # what visibility costs
    selection: Value  # what the choice costs
    noise: Value
    drift: Value  # of local steps

    @property
    def total(self) -> Value:
        """The whole right-hand side."""
        return self.start + self.gap + self.selection + self.noise + self.drift


def lemma_4(spread: Value, q: QConstants[Value], ratio: float) -> Value:
    """Return the printed bound of ||grad F_C - grad F_S||^2 for a choice by Q-values."""
    by_spread = spread * q.smoothness * 2 / (q.mu * ratio)
    return by_spread + q.delta * (q.smoothness + q.mu * ratio) * 4 / (q.mu * q.mu * ratio)


def printed(c: Constants[Value], q: QConstants[Value] | None) -> Terms[Value]:
    """Return the terms as printed; without Q those of its proof before Lemma 4 is used."""
    deviation = c.deviation if q is None else lemma_4(c.spread, q, c.ratio)
    drift = c.smoothness * c.steps * c.lr
    return Terms(
        start=c.start * 4 / (c.lr * (c.steps * c.rounds)),
        gap=c.gap * 4,
        selection=deviation * 4,
        noise=c.smoothness * c.lr * c.noise * 2 / (c.ratio * c.visible),
        drift=drift * drift * c.second_moment * 4 / 3,
    )


def repaired(c: Constants[Value]) -> Terms[Value]:
    """Return the terms that are proved in docs/theory.md, for L k eta <= 1 and any choice."""
    drift = c.smoothness * c.steps * c.lr
    return Terms(
        start=c.start * 2 / (c.lr * (c.steps * c.rounds)),
        gap=c.gap * 4,
        selection=c.deviation * 4,
        noise=c.smoothness * c.lr * c.noise * 2 * c.per_selected,
        drift=drift * drift * c.second_moment,
    )
