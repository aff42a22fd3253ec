"""Two tiny worlds on the selector's interface: no models, no data, an answer known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedglimpse.rng import generator
from fedglimpse.types import Outcome, Selector, View


class ToyWorld(Protocol):
    def view(self, round_num: int) -> View: ...

    def share_wrong(self, view: View, slots: Tensor) -> float: ...


def play(world: ToyWorld, selector: Selector, rounds: range, k: int) -> list[float]:
    """Run rounds; returns the share of wrongly chosen clients in each."""
    shares = []
    for round_num in rounds:
        view = world.view(round_num)
        choice = selector.select(view, k)
        wrong = world.share_wrong(view, choice.slots)
        shares.append(wrong)
        selector.feedback(outcome(view, choice.slots, reward=0.9 - 0.8 * wrong))
    return shares


def outcome(view: View, slots: Tensor, reward: float, num_classes: int = 2) -> Outcome:
    per_class = torch.full((num_classes,), reward)
    weights = torch.full((len(slots),), 1.0 / len(slots))
    return Outcome(
        view.round_num, view.ids[slots], reward, reward, per_class, per_class, weights, {}
    )


@dataclass(frozen=True)
class ShuffledLabels:
    """Half of the clients are useless, and the more of them are chosen the lower the reward.

    Their updates carry a weak hint (one direction of the sketch, as large as the noise) and their
    ids never change. Which ids, and which direction, depends on the seed.
    """

    seed: int
    clients: int = 40
    visible: int = 10
    sketch_dim: int = 16

    @property
    def bad(self) -> Tensor:
        order = torch.randperm(self.clients, generator=generator(self.seed, "toy-bad"))
        return order[: self.clients // 2]

    def view(self, round_num: int) -> View:
        draw = generator(self.seed, "toy-view", round_num)
        ids = torch.randperm(self.clients, generator=draw)[: self.visible].sort().values
        sign = torch.where(torch.isin(ids, self.bad), -1.0, 1.0)
        hint = torch.randn(self.sketch_dim, generator=generator(self.seed, "toy-hint"))
        noise = torch.randn(self.visible, self.sketch_dim, generator=draw)
        return View(
            round_num,
            ids,
            torch.full_like(ids, 100),
            {"delta_sketch": noise + sign[:, None] * hint},
            {"global_sketch": torch.randn(self.sketch_dim, generator=draw)},
            draw,
        )

    def share_wrong(self, view: View, slots: Tensor) -> float:
        return float(torch.isin(view.ids[slots], self.bad).float().mean())


@dataclass(frozen=True)
class OldCue:
    """The global sketch of two rounds ago says which kind of client is right now.

    Clients are of two kinds, told by the sign of their sketch's first coordinate. Every global
    sketch carries a fresh coin; kind and coin of round t - 2 must agree. Whoever looks back only
    one round cannot do better than chance.
    """

    seed: int
    clients: int = 20
    visible: int = 6
    sketch_dim: int = 8
    lag: int = 2

    def coin(self, round_num: int) -> float:
        return (
            1.0 if torch.rand((), generator=generator(self.seed, "coin", round_num)) < 0.5 else -1.0
        )

    def view(self, round_num: int) -> View:
        draw = generator(self.seed, "toy-view", round_num)
        ids = torch.randperm(self.clients, generator=draw)[: self.visible].sort().values
        sketches = 0.1 * torch.randn(self.visible, self.sketch_dim, generator=draw)
        kind = torch.ones(self.visible)
        kind[torch.randperm(self.visible, generator=draw)[: self.visible // 2]] = -1.0
        sketches[:, 0] = kind
        past = 0.1 * torch.randn(self.sketch_dim, generator=draw)
        past[1] = self.coin(round_num)
        return View(
            round_num,
            ids,
            torch.full_like(ids, 100),
            {"delta_sketch": sketches},
            {"global_sketch": past},
            draw,
        )

    def share_wrong(self, view: View, slots: Tensor) -> float:
        kind = view.reports["delta_sketch"][slots, 0].sign()
        return float((kind != self.coin(view.round_num - self.lag)).float().mean())
