"""Visibility from recorded devices."""

from __future__ import annotations

from pathlib import Path

import torch

from fedglimpse.federation.traces import DeviceTrace
from mistakes import mistake

SESSIONS = {
    "a": [(0.0, 100.0), (5_000.0, 5_000.0)],
    "b": [(90.0, 95.0), (50_000.0, 60_000.0)],
    "c": [(86_000.0, 86_500.0)],
}


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
        DeviceTrace(5, SESSIONS, 600.0, str(path))


def test_a_good_csv_equals_the_mapping(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = [f"{name},{a},{b}\n" for name, pairs in SESSIONS.items() for a, b in pairs]
    path.write_text("device,ready_start_s,ready_end_s\n" + "".join(rows))
    from_csv = DeviceTrace(6, str(path), 600.0)
    from_mapping = DeviceTrace(6, SESSIONS, 600.0)
    for t in range(50):
        assert torch.equal(from_csv.visible(4, t), from_mapping.visible(4, t))


def test_missing_files_and_devices_are_user_errors(tmp_path: Path) -> None:
    for missing in ("", str(tmp_path / "none.csv")):
        with mistake("visibility.trace"):
            DeviceTrace(5, missing, 600.0)
    with mistake("visibility.trace_devices"):
        DeviceTrace(3, SESSIONS, 60.0, {"b": [(0.0, 1.0)], "c": [(0.0, 1.0)]})
    twice = {"a": [(0.0, 1.0), (2.0, 3.0)]}
    with mistake("visibility.trace_devices"):
        DeviceTrace(3, {"a": [(0.0, 1.0)]}, 60.0, twice)
    devices = {name: [(0.0, 9.0)] for name in "abcdefghij"}
    idle = DeviceTrace(1, {"a": [(0.0, 1.0)]}, 60.0, devices)
    with mistake("visibility.trace"):
        idle.visible(0, 0)
