"""Lemmas 1 to 4 and Theorem 1, as printed and as repaired, over 1,200 random federations."""

from __future__ import annotations

import pytest
import torch

from fedglimpse.theory import bound, lemmas
from fedglimpse.theory.check import FAMILIES, Tally, random_instances, tallies
from fedglimpse.theory.estimate import random_deviation

FALSE_AS_PRINTED = (
    "Lemma 1 as printed, worst client",
    "Lemma 1, mean over the cluster, L of F alone",
    "Lemma 3 as printed, one draw of noise",
)


@pytest.fixture(scope="module")
def found() -> dict[str, Tally]:
    return tallies(150, seed=11)  # of each of eight families


def test_there_are_enough_instances(found: dict[str, Tally]) -> None:
    assert all(tally.instances >= 1000 for tally in found.values())


@pytest.mark.parametrize("name", FALSE_AS_PRINTED)
def test_statements_that_fail_as_printed(found: dict[str, Tally], name: str) -> None:
    assert found[name].failures > 0


def test_all_other_statements_hold(found: dict[str, Tally]) -> None:
    others = {name: t.failures for name, t in found.items() if name not in FALSE_AS_PRINTED}
    assert len(others) == 11
    assert not any(others.values()), others


def test_the_bounds_are_not_idle(found: dict[str, Tally]) -> None:
    """A bound that no instance comes near would hold by accident of the draw."""
    assert found["repaired, choice by Q"].tightest > 0.4
    assert found["repaired, random choice, noise"].tightest > 0.4
    assert found["(1 − c)/c Γ², worst of all choices"].tightest > 0.99


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_lemma_4_is_never_below_what_holds_for_every_choice(family: tuple[int, ...]) -> None:
    some = random_instances(family, 150, seed=12)
    row = torch.arange(len(some.w))[:, None]
    gradients = some.problem.gradients(some.w)[row, some.cluster]
    ratio = some.setting.selected / some.setting.visible
    spread, q = lemmas.intra_variance(gradients), some.growth.constants(gradients.mean(1))
    everyone = bound.any_choice(spread, ratio)
    assert bool((bound.lemma_4(spread, q, ratio) >= 2 / (1 - ratio) * everyone - 1e-9).all())


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_printed_bound_is_never_below_the_distance_of_the_gradient_from_v(
    family: tuple[int, ...],
) -> None:
    """C >= 3.2 ||grad F - v*||^2 at any model whatsoever: nothing was trained here."""
    some = random_instances(family, 150, seed=13)
    gradients = some.problem.gradients(some.w)
    row = torch.arange(len(some.w))[:, None]
    cluster, whole = gradients[row, some.cluster].mean(1), gradients.mean(1)
    ratio = some.setting.selected / some.setting.visible
    q = some.growth.constants(cluster)
    terms = 4 * (whole - cluster).square().sum(1)
    terms = terms + 4 * bound.lemma_4(torch.zeros_like(q.delta), q, ratio)
    assert bool((terms >= 3.2 * (whole - some.growth.best).square().sum(1) - 1e-9).all())


@pytest.mark.parametrize(("visible", "selected"), [(4, 1), (6, 3), (5, 4)])
def test_random_choice_has_the_deviation_of_sampling_without_replacement(
    visible: int, selected: int
) -> None:
    source = torch.Generator().manual_seed(0)
    gradients = torch.randn(20, visible, 3, generator=source, dtype=torch.double)
    mean = lemmas.all_deviations(gradients, selected).mean(1)
    expected = [
        random_deviation(float(s), visible, selected) for s in lemmas.intra_variance(gradients)
    ]
    torch.testing.assert_close(mean, torch.tensor(expected, dtype=torch.double))
