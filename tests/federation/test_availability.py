"""Clients seen at rates of their own, and clients that come and leave: against their laws."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor

from fedglimpse.config.checks import check
from fedglimpse.config.loading import resolve
from fedglimpse.data.population import build_population
from fedglimpse.data.sources import load
from fedglimpse.federation.availability import Churn, UnequalAvailability
from fedglimpse.federation.visibility import VisibilityConfig, build_visibility
from mistakes import mistake

ROUNDS = 100_000
LABELS = torch.tensor([3, 0, 1, 0, 2, 1, 3, 3, 2, 0, 1, 2, 0, 3, 2, 1, 0, 0, 1, 2])


def labels() -> Tensor:
    return LABELS


def unequal(num_clients: int = 20, **changed: Any) -> UnequalAvailability:
    values = {"p_low": 0.02, "p_high": 0.6, **changed}
    return UnequalAvailability(num_clients, main_labels=labels, **values)


def agrees(observed: Tensor, expected: Tensor, freedom: int) -> bool:
    """Say whether Pearson's chi-square passes at the level 0.001."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic < chi2.ppf(0.999, freedom)


def rates_agree(seen: Tensor, rounds: Tensor, p: Tensor) -> bool:
    """Say whether clients `[N]` seen in so many of so many rounds each follow `p`."""
    observed = torch.stack([seen, rounds - seen]).double()
    expected = torch.stack([rounds * p, rounds * (1 - p)])
    return agrees(observed, expected, len(p))


@pytest.mark.parametrize("rates_by", ["random", "label"])
@pytest.mark.parametrize("rates", ["geometric", "zipf"])
def test_clients_are_seen_at_their_rates(rates: str, rates_by: str) -> None:
    world = unequal(rates=rates, rates_by=rates_by)
    seen = world.schedule(7, range(ROUNDS)).sum(0)
    p = world.probabilities(7)
    anybody = 1 - (1 - p).prod()  # rounds without a client do not count
    assert rates_agree(seen, torch.full((20,), ROUNDS), p / anybody)
    assert not rates_agree(seen, torch.full((20,), ROUNDS), p * 1.02 / anybody)


@pytest.mark.parametrize(
    ("rates", "second", "middle"),
    [
        ("geometric", 0.64 * (1 / 64) ** (1 / 8), 0.08),
        (
            "zipf",
            0.64 * 2 ** -(math.log(64) / math.log(9)),
            0.64 * 5 ** -(math.log(64) / math.log(9)),
        ),
    ],
)
def test_rates_fall_from_the_highest_to_the_lowest(
    rates: str, second: float, middle: float
) -> None:
    world = UnequalAvailability(9, 0.01, 0.64, rates=rates)  # type: ignore[arg-type]
    p = world.probabilities(0).sort(descending=True).values
    assert p[0] == 0.64
    assert p[-1] == 0.01
    torch.testing.assert_close(p[[1, 4]], torch.tensor([second, middle], dtype=torch.float64))
    assert UnequalAvailability(1, 0.1, 0.3).probabilities(0).tolist() == [0.3]
    assert UnequalAvailability(3, 0.3, 0.3).probabilities(0).tolist() == [0.3, 0.3, 0.3]


def test_the_order_of_rates_is_random_or_that_of_the_labels() -> None:
    orders = set()
    for seed in range(200):
        p = unequal().probabilities(seed)
        orders.add(int(p.argmax()))
        by_label = unequal(rates_by="label").probabilities(seed)
        of_label = [by_label[torch.where(labels() == label)] for label in range(4)]
        for lower, higher in itertools.pairwise(of_label):
            assert lower.min() > higher.max()
    assert orders == set(range(20))
    first = {int(unequal(rates_by="label").probabilities(seed).argmax()) for seed in range(200)}
    assert first == set(torch.where(LABELS == 0)[0].tolist())  # at random within a label


def test_rounds_without_anybody_are_redrawn() -> None:
    """With few and rare clients nearly every round needs it; all sets are compared."""
    world = UnequalAvailability(4, 0.01, 0.08)
    p = world.probabilities(1)
    shown = world.schedule(1, range(ROUNDS))
    assert shown.any(1).all()
    sets = (shown * torch.tensor([1, 2, 4, 8])).sum(1).bincount(minlength=16)[1:]
    law = []
    for members in itertools.product([False, True], repeat=4):
        member = torch.tensor(members[::-1])
        law.append(torch.where(member, p, 1 - p).prod())
    expected = ROUNDS * torch.stack(law)[1:] / (1 - law[0])
    common = expected > 5
    observed = torch.cat([sets[common], sets[~common].sum()[None]]).double()
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    assert agrees(observed, expected, len(expected) - 1)
    assert len(UnequalAvailability(10, 1e-300, 1e-300).visible(0, 0)) == 1
    assert len(UnequalAvailability(10, 1.0, 1.0).visible(0, 0)) == 10


def test_clients_stay_for_geometric_times() -> None:
    world = Churn(ROUNDS, 50, lifetime=4.0, p=1.0)
    first, end = world.stays(3)
    stays = (end - first)[end < 2**62]
    counts = stays.clamp(max=20).bincount(minlength=21)[1:].double()
    lengths = torch.arange(1, 20, dtype=torch.float64)
    law = torch.cat([0.25 * 0.75 ** (lengths - 1), torch.tensor([0.75**19])])
    assert agrees(counts, len(stays) * law, 19)


def test_those_who_are_there_are_visible_at_rate_p() -> None:
    world = Churn(300, 12, lifetime=3000.0, p=0.4)
    first, end = world.stays(0)
    rounds_there = (end.clamp(max=ROUNDS) - first.clamp(max=ROUNDS)).clamp(min=0)
    seen = torch.zeros(300, dtype=torch.long)
    for start in range(0, ROUNDS, 10_000):
        seen += world.schedule(0, range(start, start + 10_000)).sum(0)
    long_there = rounds_there > 50
    p = torch.full((int(long_there.sum()),), 0.4 / (1 - 0.6**12), dtype=torch.float64)
    assert len(p) > 200
    assert rates_agree(seen[long_there], rounds_there[long_there], p)


@settings(max_examples=30, deadline=None)
@given(
    num_clients=st.integers(2, 60),
    data=st.data(),
    lifetime=st.floats(1, 30),
    seed=st.integers(0, 1000),
)
def test_everybody_comes_once_and_is_replaced(
    num_clients: int, data: st.DataObject, lifetime: float, seed: int
) -> None:
    present = data.draw(st.integers(1, num_clients))
    world = Churn(num_clients, present, lifetime, p=1.0)
    first, end = world.stays(seed)
    assert int((first == 0).sum()) == present
    assert (end > first).all()
    last_arrival = int(first.max())
    ever: set[int] = set()
    before: set[int] = set()
    for t in range(last_arrival + 3):
        ids = set(world.visible(seed, t).tolist())
        assert len(ids) == present == world.largest
        assert not (ids - before) & ever  # who comes has never been there
        ever |= ids
        before = ids
    assert ever == set(range(num_clients))
    assert set(world.visible(seed, last_arrival + 10_000).tolist()) == ids  # they stay


def test_any_round_is_known_without_the_rounds_before() -> None:
    for world in (unequal(), Churn(40, 10, 5.0, 0.3)):
        ahead = [world.visible(2, t).tolist() for t in range(60)]
        fresh = unequal() if isinstance(world, UnequalAvailability) else Churn(40, 10, 5.0, 0.3)
        assert [fresh.visible(2, t).tolist() for t in reversed(range(60))] == ahead[::-1]


def test_many_clients() -> None:
    world = Churn(200_000, 1000, 10.0, 0.5)
    assert abs(len(world.visible(0, 500)) - 500) < 120
    assert len(UnequalAvailability(1_000_000, 1e-5, 1e-2).visible(0, 0)) > 100


def test_the_main_label_of_a_client_is_its_most_frequent_one() -> None:
    settings = resolve({"data.name": "digits", "data.clients": 20, "data.partition": "label_skew"})
    population = build_population(load("digits"), settings.data, 0)
    counts = population.label_histogram(torch.arange(20))
    most = counts.max(1).values
    for client, label in enumerate(population.main_labels.tolist()):
        assert counts[client, label] == most[client]
        assert (counts[client, :label] < most[client]).all()


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"kind": "unequal", "p_low": 0.3, "p_high": 0.2}, "p_low"),
        ({"kind": "unequal", "p_low": 0.0}, "p_low"),
        ({"kind": "unequal", "p_high": 1.1}, "p_high"),
        ({"kind": "unequal", "rates": "linear"}, "rates"),
        ({"kind": "unequal", "rates_by": "size"}, "rates_by"),
        ({"kind": "churn", "present": 101}, "present"),
        ({"kind": "churn", "present": 0}, "present"),
        ({"kind": "churn", "lifetime": 0.5}, "lifetime"),
        ({"kind": "churn", "p": 0.0}, "p"),
        ({"kind": "churn", "present": 9, "min_visible": 10}, "min_visible"),
    ],
)
def test_bad_bounds_name_the_key(changed: dict[str, Any], key: str) -> None:
    with mistake(f"visibility.{key}"):
        check(resolve({f"visibility.{name}": value for name, value in changed.items()}))


def test_a_server_of_devices_does_not_know_labels() -> None:
    with mistake("visibility.rates_by"):
        build_visibility(VisibilityConfig(kind="unequal", rates_by="label"), 10)
