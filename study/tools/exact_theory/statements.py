"""Every statement of the paper's Section IV on many random quadratics: how often does it fail?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from exact_theory import lemmas
from exact_theory.lemmas import Sides
from exact_theory.quadratics import QuadraticQ, Quadratics, draw, subsets
from exact_theory.training import LocalSgd, RandomPoint, Schedule, local_path, train
from fedglimpse import rng
from fedglimpse.theory import bound
from fedglimpse.theory.text import table

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


class FailureCount(NamedTuple):
    """How often a statement failed."""

    instances: int
    failures: int
    tightest: float  # largest left / right, where right is positive

    def joined(self, other: FailureCount) -> FailureCount:
        """Return the count over the instances of both."""
        return FailureCount(
            self.instances + other.instances,
            self.failures + other.failures,
            max(self.tightest, other.tightest),
        )


class Instances(NamedTuple):
    """B random federations of one family with everything the statements need."""

    problem: Quadratics
    w: Tensor  # [B, p]
    cluster: Tensor  # [B, V]
    q: QuadraticQ
    schedule: Schedule
    seed: int

    @property
    def noiseless(self) -> Schedule:
        """The same training without noise."""
        local = self.schedule.local
        return replace(self.schedule, local=replace(local, noise=torch.zeros_like(local.noise)))


def random_instances(family: Family, count: int, seed: int) -> Instances:
    """Draw federations with L k eta uniform in (0, 1) and sigma^2 in (0, 2)."""
    source = rng.generator(seed, "theory-check", *family[:5])
    problem = draw(count, family.clients, family.dim, seed, lowest=family.lowest)
    w = 3 * torch.randn(count, family.dim, generator=source, dtype=torch.double)
    uniform = torch.rand(3, count, generator=source, dtype=torch.double)
    step_share, noise_share, best_share = uniform
    lr = step_share / (problem.smoothness() * family.steps)
    shape = _random_curvature(count, family.dim, source)
    best = problem.gradients(w).mean(1) * best_share[:, None]
    local = LocalSgd(family.steps, lr, 2 * noise_share)
    return Instances(
        problem,
        w,
        subsets(count, family.clients, family.visible, source),
        QuadraticQ(shape, best),
        Schedule(ROUNDS, family.visible, family.selected, local),
        seed,
    )


def _random_curvature(count: int, dim: int, source: torch.Generator) -> Tensor:
    """Return symmetric matrices `[B, p, p]` with eigenvalues in [0.2, 2.2]."""
    basis_draw = torch.randn(count, dim, dim, generator=source, dtype=torch.double)
    basis = torch.linalg.qr(basis_draw)[0]
    eigenvalues = 0.2 + 2 * torch.rand(count, dim, generator=source, dtype=torch.double)
    return torch.einsum("bij,bj,bkj->bik", basis, eigenvalues, basis)


def statements(instances: Instances) -> Iterator[tuple[str, Sides]]:
    """Yield every statement with its two sides."""
    yield from _lemmas_1_to_3(instances)
    yield from _lemma_4(instances)
    yield from _theorem(instances)


def check(instances: int, seed: int = 0) -> dict[str, FailureCount]:
    """Check everything on `instances` federations of each family."""
    counts: dict[str, FailureCount] = {}
    for family in FAMILIES:
        for name, sides in statements(random_instances(family, instances, seed)):
            count = _failure_count(sides)
            if name in counts:
                count = counts[name].joined(count)
            counts[name] = count
    return counts


def _failure_count(sides: Sides) -> FailureCount:
    positive = sides.right > 0
    tightest = float((sides.left[positive] / sides.right[positive]).max())
    return FailureCount(len(sides.left), int((~sides.holds).sum()), tightest)


def failures_text(counts: Mapping[str, FailureCount]) -> str:
    """Return the counts as a Markdown table."""
    rows = []
    for name, count in counts.items():
        figures = [str(count.instances), str(count.failures), f"{count.tightest:.2f}"]
        rows.append([name, *figures])
    return table(["statement", "instances", "fail", "largest left ÷ right"], rows)


def _lemmas_1_to_3(instances: Instances) -> Iterator[tuple[str, Sides]]:
    problem = instances.problem
    w = instances.w
    cluster = instances.cluster
    local = instances.schedule.local
    path = local_path(problem, RandomPoint.fixed(w), cluster, local)
    of_clients = problem.smoothness()
    of_objective = problem.objective_smoothness()
    last = local.steps - 1
    yield (
        "Lemma 1 as printed, worst client",
        lemmas.lemma_1(problem, w, path, last, of_clients, averaged=False),
    )
    yield (
        "Lemma 1, mean over the cluster, L of F alone",
        lemmas.lemma_1(problem, w, path, last, of_objective, averaged=True),
    )
    yield (
        "Lemma 1, mean over the cluster, L of every client",
        lemmas.lemma_1(problem, w, path, last, of_clients, averaged=True),
    )
    chosen = cluster[:, : instances.schedule.selected]
    yield "Lemma 2", lemmas.lemma_2(problem, w, cluster, chosen)
    expected = lemmas.lemma_3(w, path, local.steps, local.lr)
    sampled = lemmas.sampled_distance(problem, w, cluster, local, instances.seed)
    yield "Lemma 3 as printed, one draw of noise", Sides(sampled, expected.right)
    yield "Lemma 3, in expectation", expected


def _lemma_4(instances: Instances) -> Iterator[tuple[str, Sides]]:
    gradients = instances.problem.gradients_of(instances.cluster, instances.w)
    count = instances.schedule.selected
    ratio = count / instances.schedule.visible
    spread = lemmas.intra_variance(gradients)
    q = instances.q.constants(gradients.mean(1))
    best = lemmas.deviation(gradients, instances.q.largest(gradients, count))
    worst = lemmas.all_deviations(gradients, count).amax(1)
    yield "Lemma 4, largest Q", Sides(best, bound.lemma_4(spread, q, ratio))
    yield "Lemma 4, worst of all choices", Sides(worst, bound.lemma_4(spread, q, ratio))
    yield "Lemma 4 without 1/c, largest Q", Sides(best, lemmas.lemma_4_top(spread, q))
    yield "(1 − c)/c Γ², worst of all choices", Sides(worst, lemmas.any_choice(spread, ratio))


def _theorem(instances: Instances) -> Iterator[tuple[str, Sides]]:
    problem = instances.problem
    w = instances.w
    seed = instances.seed
    smoothness = problem.smoothness()
    by_q = train(problem, w, instances.noiseless, smoothness, seed, instances.q)
    at_random = train(problem, w, instances.schedule, smoothness, seed)
    printed_by_q = bound.printed(by_q.constants, by_q.q)
    printed_at_random = bound.printed(at_random.constants, None)
    yield "Theorem 1, choice by Q", Sides(by_q.measured, printed_by_q.total)
    yield (
        "Theorem 1 before Lemma 4, random choice, noise",
        Sides(at_random.measured, printed_at_random.total),
    )
    yield "repaired, choice by Q", Sides(by_q.measured, bound.repaired(by_q.constants).total)
    yield (
        "repaired, random choice, noise",
        Sides(at_random.measured, bound.repaired(at_random.constants).total),
    )
