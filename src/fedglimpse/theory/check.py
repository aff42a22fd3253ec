"""Every statement of the paper's Section IV on many random quadratics: how often does it fail?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.theory import bound, lemmas
from fedglimpse.theory.lemmas import Growth, Sides
from fedglimpse.theory.quadratics import Quadratics, draw, subsets
from fedglimpse.theory.text import table
from fedglimpse.theory.training import Setting, train

ROUNDS = 12


class Family(NamedTuple):
    """A kind of federation."""

    clients: int
    visible: int
    selected: int
    dim: int
    steps: int
    lowest: float  # smallest eigenvalue of a client; negative: not convex


_SHAPES = ((2, 2, 1, 1, 2), (6, 4, 2, 3, 4), (8, 8, 4, 2, 3), (10, 5, 2, 4, 5))
FAMILIES = tuple(Family(*shape, lowest) for shape in _SHAPES for lowest in (0.1, -1.0))


class Tally(NamedTuple):
    """What became of one statement."""

    instances: int
    failures: int
    tightest: float  # largest left / right, where right is positive


class Instances(NamedTuple):
    """B random federations of one family with everything the statements speak of."""

    problem: Quadratics
    w: Tensor  # [B, p]
    cluster: Tensor  # [B, V]
    growth: Growth
    setting: Setting
    quiet: Setting  # the same without noise
    seed: int


def random_instances(family: Family, count: int, seed: int) -> Instances:
    """Draw federations with L k eta uniform in (0, 1) and sigma^2 in (0, 2)."""
    source = rng.generator(seed, "theory-check", *family[:5])
    problem = draw(count, family.clients, family.dim, seed, lowest=family.lowest)
    w = 3 * torch.randn(count, family.dim, generator=source, dtype=torch.double)
    part = torch.rand(3, count, generator=source, dtype=torch.double)
    lr = part[0] / (problem.smoothness() * family.steps)
    turn = torch.randn(count, family.dim, family.dim, generator=source, dtype=torch.double)
    basis = torch.linalg.qr(turn)[0]
    sharp = 0.2 + 2 * torch.rand(count, family.dim, generator=source, dtype=torch.double)
    shape = torch.einsum("bij,bj,bkj->bik", basis, sharp, basis)
    setting = Setting(ROUNDS, family.steps, family.visible, family.selected, lr, 2 * part[1])
    return Instances(
        problem,
        w,
        subsets(count, family.clients, family.visible, source),
        Growth(shape, problem.gradients(w).mean(1) * part[2][:, None]),
        setting,
        replace(setting, noise=torch.zeros_like(lr)),
        seed,
    )


def statements(some: Instances) -> Iterator[tuple[str, Sides]]:
    """Yield every statement with its two sides."""
    yield from _first_lemmas(some)
    yield from _fourth_lemma(some)
    yield from _theorem(some)


def tallies(instances: int, seed: int = 0) -> dict[str, Tally]:
    """Check everything on `instances` federations of each family."""
    found: dict[str, list[Tally]] = {}
    for family in FAMILIES:
        for name, sides in statements(random_instances(family, instances, seed)):
            failures = int((~sides.holds).sum())
            positive = sides.right > 0
            tightest = float((sides.left[positive] / sides.right[positive]).max())
            found.setdefault(name, []).append(Tally(len(sides.left), failures, tightest))
    return {
        name: Tally(
            sum(t.instances for t in some),
            sum(t.failures for t in some),
            max(t.tightest for t in some),
        )
        for name, some in found.items()
    }


def tally_text(found: Mapping[str, Tally]) -> str:
    """Return the outcome as a Markdown table."""
    body = [[n, f"{t.instances}", f"{t.failures}", f"{t.tightest:.2f}"] for n, t in found.items()]
    return table(["statement", "instances", "fail", "largest left ÷ right"], body)


def _first_lemmas(some: Instances) -> Iterator[tuple[str, Sides]]:
    problem, w, setting = some.problem, some.w, some.setting
    path = lemmas.path_from(problem, w, some.cluster, setting.lr, setting.steps, setting.noise)
    every, alone = problem.smoothness(), problem.objective_smoothness()
    last = setting.steps - 1
    yield (
        "Lemma 1 as printed, worst client",
        lemmas.lemma_1(problem, w, path, last, every, averaged=False),
    )
    yield (
        "Lemma 1, mean over the cluster, L of F alone",
        lemmas.lemma_1(problem, w, path, last, alone, averaged=True),
    )
    yield (
        "Lemma 1, mean over the cluster, L of every client",
        lemmas.lemma_1(problem, w, path, last, every, averaged=True),
    )
    chosen = some.cluster[:, : setting.selected]
    yield "Lemma 2", lemmas.lemma_2(problem, w, some.cluster, chosen)
    in_the_mean = lemmas.lemma_3(w, path, setting.steps, setting.lr)
    drawn = lemmas.drawn_distance(
        problem, w, some.cluster, setting.lr, setting.steps, setting.noise, some.seed
    )
    yield "Lemma 3 as printed, one draw of noise", Sides(drawn, in_the_mean.right)
    yield "Lemma 3, in expectation", in_the_mean


def _fourth_lemma(some: Instances) -> Iterator[tuple[str, Sides]]:
    row = torch.arange(len(some.w))[:, None]
    gradients = some.problem.gradients(some.w)[row, some.cluster]
    count, ratio = some.setting.selected, some.setting.selected / some.setting.visible
    spread, q = lemmas.intra_variance(gradients), some.growth.constants(gradients.mean(1))
    best = some.growth.q(gradients).argsort(1, descending=True)[:, :count]
    deviation = lemmas.deviation(gradients, best)
    worst = lemmas.all_deviations(gradients, count).amax(1)
    yield "Lemma 4, largest Q", Sides(deviation, bound.lemma_4(spread, q, ratio))
    yield "Lemma 4, worst of all choices", Sides(worst, bound.lemma_4(spread, q, ratio))
    yield "Lemma 4 without 1/c, largest Q", Sides(deviation, bound.lemma_4_top(spread, q))
    yield "(1 − c)/c Γ², worst of all choices", Sides(worst, bound.any_choice(spread, ratio))


def _theorem(some: Instances) -> Iterator[tuple[str, Sides]]:
    every = some.problem.smoothness()
    quiet = train(some.problem, some.w, some.quiet, every, some.seed, some.growth)
    noisy = train(some.problem, some.w, some.setting, every, some.seed)
    yield (
        "Theorem 1, choice by Q",
        Sides(quiet.measured, bound.printed(quiet.constants, quiet.q).total),
    )
    yield (
        "Theorem 1 before Lemma 4, random choice, noise",
        Sides(noisy.measured, bound.printed(noisy.constants, None).total),
    )
    yield "repaired, choice by Q", Sides(quiet.measured, bound.repaired(quiet.constants).total)
    yield (
        "repaired, random choice, noise",
        Sides(noisy.measured, bound.repaired(noisy.constants).total),
    )
