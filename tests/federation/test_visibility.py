from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedglimpse.federation.traces import DeviceTrace
from fedglimpse.federation.visibility import (
    PATTERNS,
    Full,
    MarkovOnOff,
    MobileServer,
    OverlappingClusters,
    RandomAvailability,
    VisibilityConfig,
    build_visibility,
)
from fedglimpse.types import Visibility
from mistakes import mistake

SESSIONS = {
    "a": [(0.0, 100.0), (5_000.0, 5_000.0)],
    "b": [(90.0, 95.0), (50_000.0, 60_000.0)],
    "c": [(86_000.0, 86_500.0)],
}
SETTINGS = VisibilityConfig(cluster_size=4, p=0.2, overlap=1, p_on=0.1, p_off=0.3)


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


@pytest.mark.parametrize("kind", ["mobile", "overlapping", "random", "markov", "trace"])
def test_seeds_and_rounds_differ(kind: str) -> None:
    world = build(kind, 40)
    runs = [[tuple(world.visible(seed, t).tolist()) for t in range(200)] for seed in (0, 1)]
    assert runs[0] != runs[1]
    assert len(set(runs[0])) > 3


def test_full_shows_everybody() -> None:
    assert Full(3).visible(0, 7).tolist() == [0, 1, 2]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 80), st.data())
def test_clusters_partition_the_population_evenly(num_clients: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, num_clients))
    partition = MobileServer(num_clients, size).clusters
    clusters = [partition.cluster(5, i) for i in range(partition.num_clusters)]
    assert torch.cat(clusters).sort().values.tolist() == list(range(num_clients))
    sizes = [len(c) for c in clusters]
    assert max(sizes) - min(sizes) <= 1
    assert len(clusters) == max(1, round(num_clients / size))


def test_21_clients_in_clusters_of_10_give_11_and_10() -> None:
    clusters = MobileServer(21, 10).clusters
    assert [len(clusters.cluster(0, i)) for i in range(clusters.num_clusters)] == [11, 10]


def test_mobile_server_visits_all_clusters_uniformly_with_repetition() -> None:
    world = MobileServer(40, 10)
    seen = [tuple(world.visible(3, t).tolist()) for t in range(400)]
    counts = [seen.count(c) for c in set(seen)]
    assert len(counts) == 4
    assert sum((n - 100) ** 2 / 100 for n in counts) < 16.3  # chi-square, 3 degrees, p = 0.001
    assert any(a == b for a, b in itertools.pairwise(seen))


def test_cyclic_order_repeats_after_one_tour() -> None:
    world = MobileServer(12, 4, "cyclic")
    tour = [tuple(world.visible(0, t).tolist()) for t in range(6)]
    assert len(set(tour[:3])) == 3
    assert tour[:3] == tour[3:]


@settings(max_examples=40, deadline=None)
@given(st.integers(10, 60), st.data())
def test_neighbouring_clusters_overlap_and_cover(num_clients: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, num_clients // 3))
    overlap = data.draw(st.integers(0, size // 2))
    world = OverlappingClusters(num_clients, size, overlap)
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


def test_trace_by_hand() -> None:
    sessions = {"x": [(10.0, 20.0), (130.0, 130.0)]}
    world = DeviceTrace(1, sessions, 10.0, {"x": [(0.0, 200.0)]}, start=0.0)
    # windows of 10 s: ready within 1 (10-20) and 13 (130-131); 20 is no longer ready
    table = world._replay(0)
    assert (table.start.tolist(), table.end.tolist()) == ([10.0, 130.0], [20.0, 131.0])
    two = DeviceTrace(
        2,
        sessions | {"y": [(0.0, 200.0)]},
        10.0,
        {"x": [(0.0, 200.0)], "y": [(0.0, 200.0)]},
        start=0.0,
    )
    both = [t for t in range(60) if len(two.visible(0, t)) == 2]
    assert both == [1, 13, 21, 33, 41, 53]  # the trace of 20 windows repeats


def test_trace_uses_each_device_own_span_and_wraps_windows() -> None:
    sessions = {"x": [(100.0, 105.0)], "y": [(1000.0, 1200.0)]}
    spans = {"x": [(100.0, 130.0)], "y": [(1000.0, 1200.0)]}
    world = DeviceTrace(2, sessions, 20.0, spans, start=1000.0)
    # x repeats every 30 s at 1000, 1030, 1060, ...; y is always ready
    both = [t for t in range(6) if len(world.visible(0, t)) == 2]
    assert both == [0, 1, 3, 4]  # 1000-1020, 1020-1040 (1030), not 1040-1060, 1060-1080, 1080-1100
    late = DeviceTrace(1, {"x": [(25.0, 40.0)]}, 5.0, {"x": [(0.0, 30.0)]}, start=0.0)
    assert late._replay(0).end.tolist() == [40.0]  # runs on into the next turn
    quiet = DeviceTrace(1, {"x": [(0.0, 5.0)]}, 1000.0, {"x": [(0.0, 30.0)]}, start=0.0)
    assert quiet.visible(0, 3).tolist() == [0]  # a window longer than the trace


def test_trace_waits_for_the_next_window_with_somebody() -> None:
    sessions = {"x": [(0.0, 10.0)], "y": [(500.0, 520.0)]}
    spans = {"x": [(0.0, 1000.0)], "y": [(0.0, 1000.0)]}
    world = DeviceTrace(2, sessions, 10.0, spans, start=0.0)
    # x is ready in one window of a turn, y in the two of 500 to 520 s: empty ones are no rounds
    rounds = [world.visible(0, t).tolist() for t in range(7)]
    x = rounds[0]
    y = rounds[1]
    assert sorted(x + y) == [0, 1]
    assert rounds == [x, y, y, x, y, y, x]
    again = DeviceTrace(2, sessions, 10.0, spans, start=0.0)
    assert again.visible(0, 5).tolist() == y  # whatever was asked before


def test_the_largest_cluster_is_known() -> None:
    for clients, size, overlap in [(26, 10, 0), (14, 10, 0), (100, 10, 3), (7, 7, 6), (9, 2, 1)]:
        world = OverlappingClusters(clients, size, overlap)
        sizes = [len(world.cluster(0, i)) for i in range(world.num_clusters)]
        assert world.largest == max(sizes)


def test_trace_samples_devices_or_shifts_the_clock_of_reused_ones() -> None:
    sessions = {str(i): [(1000.0 * i, 1000.0 * i + 100)] for i in range(20)}
    few = DeviceTrace(5, sessions, 100.0)._replay(0)
    assert len(few.clock.unique()) == 5  # five different devices
    many = DeviceTrace(50, sessions, 100.0)._replay(0)
    assert many.client.tolist() == list(range(50))
    assert len(((many.clock - many.start) % 86_400).unique()) > 40


def test_trace_without_spans_repeats_after_whole_days() -> None:
    world = DeviceTrace(2, {"a": [(100.0, 200.0)], "b": [(0.0, 86_401.0)]}, 60.0)
    assert sorted(world._sessions.span.tolist()) == [86_400.0, 172_800.0]


def test_a_csv_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes("device,trace_start_s,trace_end_s\nKöln,1,2\n".encode("latin-1"))
    with mistake("visibility.trace_devices"):
        build("trace", 5, trace="unread.csv", trace_devices=str(path))


def test_a_good_csv_equals_the_mapping(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{name},{a},{b}\n" for name, pairs in SESSIONS.items() for a, b in pairs]
    path.write_text("device,ready_start_s,ready_end_s\n" + "".join(rows))
    from_csv = build("trace", 6, trace=str(path))
    from_mapping = DeviceTrace(6, SESSIONS, 600.0)
    for t in range(50):
        assert torch.equal(from_csv.visible(4, t), from_mapping.visible(4, t))


def test_missing_files_and_devices_are_user_errors(tmp_path: Path) -> None:
    for missing in ("", str(tmp_path / "none.csv")):
        with mistake("visibility.trace"):
            build("trace", 5, trace=missing)
    with mistake("visibility.trace_devices"):
        DeviceTrace(3, SESSIONS, 60.0, {"b": [(0.0, 1.0)], "c": [(0.0, 1.0)]})
    twice = {"a": [(0.0, 1.0), (2.0, 3.0)]}
    with mistake("visibility.trace_devices"):
        DeviceTrace(3, {"a": [(0.0, 1.0)]}, 60.0, twice)
    devices = {name: [(0.0, 9.0)] for name in "abcdefghij"}
    idle = DeviceTrace(1, {"a": [(0.0, 1.0)]}, 60.0, devices)
    with mistake("visibility.trace"):
        idle.visible(0, 0)


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
