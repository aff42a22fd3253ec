"""Who is visible in a round."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedglimpse.federation.availability import MarkovOnOff, RandomAvailability
from fedglimpse.federation.traces import DeviceTrace
from fedglimpse.federation.visibility import (
    PATTERNS,
    Clusters,
    Full,
    VisibilityConfig,
    build_visibility,
)
from fedglimpse.types import Visibility
from mistakes import mistake

SESSIONS = {"a": [(0.0, 100.0)], "b": [(90.0, 95.0), (50_000.0, 60_000.0)]}
SETTINGS = VisibilityConfig(
    cluster_size=4, p=0.2, overlap=1, p_on=0.1, p_off=0.3, present=4, lifetime=6.0
)


def build(kind: str, num_clients: int, **changed: Any) -> Visibility:
    if kind == "trace" and "trace" not in changed:
        return DeviceTrace(num_clients, SESSIONS, 600.0)
    return build_visibility(replace(SETTINGS, kind=kind, **changed), num_clients)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(PATTERNS)),
    num_clients=st.integers(4, 60),
    seed=st.integers(0, 2**31),
    rounds=st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_is_a_pure_function_that_returns_valid_ids(
    kind: str, num_clients: int, seed: int, rounds: list[int]
) -> None:
    used = build(kind, num_clients)
    for round_num in rounds:
        ids = used.visible(seed, round_num)
        assert ids.dtype == torch.int64
        assert ids.dim() == 1
        assert len(ids) >= 1
        assert torch.equal(ids, ids.unique())  # sorted, no repetition
        assert ids.min() >= 0
        assert ids.max() < num_clients
        used.visible(seed + 1, round_num)  # another lane in between changes nothing
        assert torch.equal(ids, build(kind, num_clients).visible(seed, round_num))


@pytest.mark.parametrize(
    "kind", ["mobile", "overlapping", "random", "markov", "unequal", "churn", "trace"]
)
def test_seeds_and_rounds_differ(kind: str) -> None:
    world = build(kind, 40)
    runs = [[tuple(world.visible(seed, t).tolist()) for t in range(200)] for seed in (0, 1)]
    assert runs[0] != runs[1]
    assert len(set(runs[0])) > 3


def test_every_pattern_is_described_and_can_be_built() -> None:
    for pattern in PATTERNS.values():
        assert pattern.meaning
        assert all(hasattr(SETTINGS, name) for name in pattern.settings)


def test_full_shows_everybody() -> None:
    assert Full(3).visible(0, 7).tolist() == [0, 1, 2]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 80), st.data())
def test_clusters_partition_the_population_evenly(num_clients: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, num_clients))
    partition = Clusters(num_clients, size)
    clusters = [partition.cluster(5, i) for i in range(partition.num_clusters)]
    assert torch.cat(clusters).sort().values.tolist() == list(range(num_clients))
    sizes = [len(c) for c in clusters]
    assert max(sizes) - min(sizes) <= 1
    assert len(clusters) == max(1, round(num_clients / size))


def test_21_clients_in_clusters_of_10_give_11_and_10() -> None:
    clusters = Clusters(21, 10)
    assert [len(clusters.cluster(0, i)) for i in range(clusters.num_clusters)] == [11, 10]


def test_mobile_server_visits_all_clusters_uniformly_with_repetition() -> None:
    world = Clusters(40, 10)
    seen = [tuple(world.visible(3, t).tolist()) for t in range(400)]
    counts = [seen.count(c) for c in set(seen)]
    assert len(counts) == 4
    assert sum((n - 100) ** 2 / 100 for n in counts) < 16.3  # chi-square, 3 degrees, p = 0.001
    assert any(a == b for a, b in itertools.pairwise(seen))


def test_cyclic_order_repeats_after_one_tour() -> None:
    world = Clusters(12, 4, order="cyclic")
    tour = [tuple(world.visible(0, t).tolist()) for t in range(6)]
    assert len(set(tour[:3])) == 3
    assert tour[:3] == tour[3:]


@settings(max_examples=40, deadline=None)
@given(st.integers(10, 60), st.data())
def test_neighbouring_clusters_overlap_and_cover(num_clients: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, num_clients // 3))
    overlap = data.draw(st.integers(0, size // 2))
    world = Clusters(num_clients, size, overlap)
    clusters = [set(world.cluster(1, i).tolist()) for i in range(world.num_clusters)]
    assert set().union(*clusters) == set(range(num_clients))
    if len(clusters) > 2:
        for left, right in zip(clusters, clusters[1:] + clusters[:1], strict=True):
            assert len(left & right) == overlap
    if num_clients % (size - overlap) == 0:
        assert {len(c) for c in clusters} == {size}


def test_random_availability_includes_each_client_at_rate_p() -> None:
    world = RandomAvailability(50, 0.3)
    hits = torch.zeros(50)
    sizes = []
    for t in range(1000):
        ids = world.visible(0, t)
        hits[ids] += 1
        sizes.append(float(len(ids)))
    assert abs(hits.mean() / 1000 - 0.3) < 0.01
    assert ((hits / 1000 - 0.3).abs() < 0.06).all()  # four standard errors
    assert abs(torch.tensor(sizes).var() / (50 * 0.3 * 0.7) - 1) < 0.2  # binomial spread


def test_empty_draws_are_redrawn_and_one_client_is_a_round() -> None:
    world = RandomAvailability(10, 0.02)
    sizes = torch.tensor([len(world.visible(0, t)) for t in range(2000)], dtype=torch.float32)
    assert (sizes == 1).any()
    assert sizes.min() == 1
    assert abs(sizes.mean() - 0.2 / (1 - 0.98**10)) < 0.03  # given that it is not empty
    ids = torch.cat([world.visible(1, t) for t in range(2000)])
    assert torch.bincount(ids, minlength=10).min() > 150  # no client is favoured
    assert len(RandomAvailability(10, 1e-12).visible(0, 0)) == 1
    assert len(RandomAvailability(10, 1.0).visible(0, 0)) == 10


def test_random_availability_of_a_million_clients() -> None:
    ids = RandomAvailability(1_000_000, 1e-3).visible(0, 0)
    assert abs(len(ids) - 1000) < 160
    assert abs(ids.double().mean() / 1e6 - 0.5) < 0.05


@pytest.mark.parametrize(("p_on", "p_off"), [(0.05, 0.15), (0.7, 0.6)])
def test_markov_is_stationary_from_round_0_with_the_right_memory(p_on: float, p_off: float) -> None:
    world = MarkovOnOff(400, p_on, p_off)
    on = torch.zeros(200, 400)
    for t in range(200):
        on[t, world.visible(2, t)] = 1
    rate = p_on / (p_on + p_off)
    assert abs(on[0].mean() - rate) < 0.1
    assert abs(on.mean() - rate) < 0.03
    spread = rate * (1 - rate)
    for lag in (1, 3):
        memory = ((on[lag:] - rate) * (on[:-lag] - rate)).mean() / spread
        assert abs(memory - (1 - p_on - p_off) ** lag) < 0.05
    changes = on[1:][on[:-1] == 0].mean()
    assert abs(changes - p_on) < 0.02


def test_markov_answers_the_same_in_any_order() -> None:
    forward = MarkovOnOff(30, 0.1, 0.2)
    backward = MarkovOnOff(30, 0.1, 0.2)
    ahead = [forward.visible(0, t).tolist() for t in range(30)]
    assert [backward.visible(0, t).tolist() for t in reversed(range(30))] == ahead[::-1]


def test_markov_never_sleeps_entirely() -> None:
    world = MarkovOnOff(3, 0.01, 1.0)
    shown = torch.cat([world.visible(0, t) for t in range(300)])
    assert torch.bincount(shown, minlength=3).min() > 60


def test_the_largest_cluster_is_known() -> None:
    for clients, size, overlap in [(26, 10, 0), (14, 10, 0), (100, 10, 3), (7, 7, 6), (9, 2, 1)]:
        world = Clusters(clients, size, overlap)
        sizes = [len(world.cluster(0, i)) for i in range(world.num_clusters)]
        assert world.largest == max(sizes)


@pytest.mark.parametrize(
    ("kind", "changed", "key"),
    [
        ("mobile", {"cluster_size": 11}, "cluster_size"),
        ("cyclic", {"cluster_size": 11}, "cluster_size"),
        ("overlapping", {"cluster_size": 11}, "cluster_size"),
        ("overlapping", {"overlap": 4}, "overlap"),
        ("mobil", {}, "kind"),
    ],
)
def test_bad_settings_name_the_key(kind: str, changed: dict[str, Any], key: str) -> None:
    with mistake(f"visibility.{key}"):
        build(kind, 10, **changed)
