"""Lemmas 1 to 4 and Theorem 1, as printed and as repaired, over 1,200 random federations."""

from __future__ import annotations

import pytest
import torch

from exact_theory import lemmas
from exact_theory.statements import FAMILIES, FailureCount, Family, check, random_instances
from fedglimpse.theory import bound
from fedglimpse.theory.estimate import random_deviation

FALSE_AS_PRINTED = (
    "Lemma 1 as printed, worst client",
    "Lemma 1, mean over the cluster, L of F alone",
    "Lemma 3 as printed, one draw of noise",
)


@pytest.fixture(scope="module")
def counts() -> dict[str, FailureCount]:
    return check(150, seed=11)  # of each of eight families


def test_there_are_enough_instances(counts: dict[str, FailureCount]) -> None:
    assert all(count.instances >= 1000 for count in counts.values())


@pytest.mark.parametrize("name", FALSE_AS_PRINTED)
def test_statements_that_fail_as_printed(counts: dict[str, FailureCount], name: str) -> None:
    assert counts[name].failures > 0


def test_all_other_statements_hold(counts: dict[str, FailureCount]) -> None:
    failures = {
        name: count.failures for name, count in counts.items() if name not in FALSE_AS_PRINTED
    }
    assert len(failures) == 11
    assert not any(failures.values()), failures


def test_the_bounds_are_not_idle(counts: dict[str, FailureCount]) -> None:
    """A bound that no instance comes near would hold by accident of the draw."""
    assert counts["repaired, choice by Q"].tightest > 0.4
    assert counts["repaired, random choice, noise"].tightest > 0.4
    assert counts["(1 − c)/c Γ², worst of all choices"].tightest > 0.99


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_lemma_4_is_never_below_what_holds_for_every_choice(family: Family) -> None:
    instances = random_instances(family, 150, seed=12)
    gradients = instances.problem.gradients_of(instances.cluster, instances.w)
    ratio = instances.schedule.selected / instances.schedule.visible
    spread = lemmas.intra_variance(gradients)
    q = instances.q.constants(gradients.mean(1))
    for_every_choice = lemmas.any_choice(spread, ratio)
    least = 2 / (1 - ratio) * for_every_choice
    assert bool((bound.lemma_4(spread, q, ratio) >= least - 1e-9).all())


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_printed_bound_is_never_below_the_distance_of_the_gradient_from_v(
    family: Family,
) -> None:
    """C >= 3.2 ||grad F - v*||^2 at any model whatsoever: nothing was trained here."""
    instances = random_instances(family, 150, seed=13)
    objective = instances.problem.gradients(instances.w).mean(1)
    cluster = instances.problem.gradients_of(instances.cluster, instances.w).mean(1)
    ratio = instances.schedule.selected / instances.schedule.visible
    q = instances.q.constants(cluster)
    visibility = 4 * (objective - cluster).square().sum(1)
    selection = 4 * bound.lemma_4(torch.zeros_like(q.delta), q, ratio)
    distance = (objective - instances.q.best).square().sum(1)
    assert bool((visibility + selection >= 3.2 * distance - 1e-9).all())


@pytest.mark.parametrize(("visible", "selected"), [(4, 1), (6, 3), (5, 4)])
def test_random_choice_has_the_deviation_of_sampling_without_replacement(
    visible: int, selected: int
) -> None:
    source = torch.Generator().manual_seed(0)
    gradients = torch.randn(20, visible, 3, generator=source, dtype=torch.double)
    mean_deviation = lemmas.all_deviations(gradients, selected).mean(1)
    expected = [
        random_deviation(float(spread), visible, selected)
        for spread in lemmas.intra_variance(gradients)
    ]
    torch.testing.assert_close(mean_deviation, torch.tensor(expected, dtype=torch.double))
