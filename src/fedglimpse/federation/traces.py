"""Visibility from real traces: when devices were ready, replayed on a clock that wraps around."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.errors import UserError, require

_DAY = 86_400.0
_FARTHEST = 1e12  # seconds, thirty thousand years: beyond it, clocks lose their seconds
Interval = tuple[float, float]  # start, end in seconds
Intervals = Mapping[str, Sequence[Interval]]  # device -> its intervals


class _Columns(NamedTuple):
    """The columns of a csv, besides `device`."""

    key: str  # the setting that names the file
    start: str
    end: str


_SESSIONS = _Columns("visibility.trace", "ready_start_s", "ready_end_s")
_SPANS = _Columns("visibility.trace_devices", "trace_start_s", "trace_end_s")


class _Sessions(NamedTuple):
    """The sessions of all devices, relative to the start of the device's trace."""

    device: Tensor  # [S] index of the device, ascending
    start: Tensor  # [S] in [0, span of the device)
    end: Tensor  # [S] up to one span after the start
    origin: Tensor  # [devices] when the trace of a device begins
    span: Tensor  # [devices] after how many seconds it begins again


class _Replay(NamedTuple):
    """The sessions of all clients of one run."""

    client: Tensor  # [S] id, ascending
    start: Tensor  # [S]
    end: Tensor  # [S]
    span: Tensor  # [S] of the client's device
    clock: Tensor  # [S] the client's time in its trace when round 0 begins


@dataclass(frozen=True)
class DeviceTrace:
    """Clients follow recorded devices: visible in a round if ready at any time within it.

    A run draws N devices without replacement; with fewer devices than clients the others reuse a
    device with a random time shift. Every device repeats its own trace, and all clocks move
    together, so hours of the day stay aligned between devices whose traces span whole days. Where
    no client is ready the server waits for the first later window in which one is.

    Attributes:
        num_clients: N.
        trace: a csv with the columns device, ready_start_s, ready_end_s, or the same as a mapping
            from device to (start, end) pairs. A session of no length counts as one second.
        round_seconds: the length of a round's window.
        trace_devices: a csv with the columns device, trace_start_s, trace_end_s, or the same as a
            mapping to one pair. Without it a trace goes from the first start to the last end of
            the device's sessions, rounded up to whole days. A device without sessions is never
            visible.
        start: seconds on the trace clock at which round 0 begins; None draws it for each run.
    """

    num_clients: int
    trace: str | Path | Intervals
    round_seconds: float
    trace_devices: str | Path | Intervals = ""
    start: float | None = None
    _sessions: _Sessions = field(init=False, repr=False, compare=False)
    _windows: dict[int, list[int]] = field(  # seed -> the window of each round
        default_factory=dict, init=False, repr=False, compare=False
    )
    _replays: dict[int, _Replay] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        require(
            bool(self.trace),
            "visibility.kind=trace needs a csv of sessions: set visibility.trace to its path.",
            key="visibility.trace",
        )
        spans = None
        if self.trace_devices:
            spans = _load(self.trace_devices, _SPANS)
        sessions = _load(self.trace, _SESSIONS)
        object.__setattr__(self, "_sessions", _tabulate(sessions, spans))

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the clients that are ready in the round's window.

        Windows in which no client is ready are not rounds: round r is the r-th of the others.
        """
        if seed not in self._replays:
            self._replays[seed] = self._replay(seed)
            self._windows[seed] = []
        replay = self._replays[seed]
        windows = self._windows[seed]
        while len(windows) <= round_num:
            next_window = windows[-1] + 1 if windows else 0
            windows.append(self._first_ready_window(replay, next_window))
        ready = self._ready(replay, windows[round_num])
        return torch.unique_consecutive(replay.client[ready])  # [V] sorted

    def _first_ready_window(self, replay: _Replay, window: int) -> int:
        """Return the first window, from this one on, in which a client is ready."""
        while not self._ready(replay, window).any():
            window_start = (replay.clock + window * self.round_seconds) % replay.span  # [S]
            seconds_to_wait = float(((replay.start - window_start) % replay.span).min())
            window += max(1, int(seconds_to_wait // self.round_seconds))
        return window

    def _ready(self, replay: _Replay, window: int) -> Tensor:
        """Return which sessions `[S]` reach into a window."""
        # A window longer than a trace sees all of it, and must not see anything twice.
        width = torch.clamp(replay.span, max=self.round_seconds)  # [S]
        window_start = (replay.clock + window * self.round_seconds) % replay.span  # [S]
        ready = torch.zeros_like(replay.client, dtype=torch.bool)  # [S]
        for shift in (-replay.span, 0.0, replay.span):  # windows and sessions cross the wrap
            ready |= (replay.start + shift < window_start + width) & (
                replay.end + shift > window_start
            )
        return ready

    def _replay(self, seed: int) -> _Replay:
        """Give every client a device, and every clock its start."""
        sessions = self._sessions
        source = rng.generator(seed, "trace")
        device = self._draw_devices(source)  # [N]
        clock = self._draw_clocks(device, source)  # [N]

        sessions_of = torch.bincount(sessions.device, minlength=len(sessions.span))  # [devices]
        per_client = sessions_of[device]  # [N]
        client = torch.repeat_interleave(torch.arange(self.num_clients), per_client)  # [S]
        require(
            len(client) > 0,
            f"None of the {self.num_clients} devices drawn with seed {seed} is ever ready: use "
            "more clients, another seed, or a trace without idle devices.",
            key="visibility.trace",
        )
        # Row of each client's session: where its device's sessions begin, and which one it is.
        first_row = sessions_of.cumsum(0) - sessions_of  # [devices]
        first_of_client = per_client.cumsum(0) - per_client  # [N]
        position = torch.arange(len(client)) - first_of_client[client]  # [S]
        row = first_row[device][client] + position  # [S]
        return _Replay(
            client=client,
            start=sessions.start[row],
            end=sessions.end[row],
            span=sessions.span[device][client],
            clock=clock[client],
        )

    def _draw_devices(self, source: torch.Generator) -> Tensor:
        """Return the device `[N]` of each client; none is reused before all are in use."""
        num_devices = len(self._sessions.span)
        orders: list[Tensor] = []
        for _ in range(math.ceil(self.num_clients / num_devices)):
            orders.append(torch.randperm(num_devices, generator=source))
        return torch.cat(orders)[: self.num_clients]

    def _draw_clocks(self, device: Tensor, source: torch.Generator) -> Tensor:
        """Return the time `[N]` in each client's trace when round 0 begins."""
        sessions = self._sessions
        shift = torch.rand(self.num_clients, generator=source, dtype=torch.float64)
        shift = (shift * sessions.span[device]).floor()  # [N]
        shift[: len(sessions.span)] = 0  # the first use of a device keeps its own clock
        uniform = torch.rand((), generator=source, dtype=torch.float64)
        start = self.start
        if start is None:
            start = float(sessions.origin.min() + (uniform * sessions.span.max()).floor())
        return start - sessions.origin[device] + shift


def _tabulate(intervals: Intervals, spans: Intervals | None) -> _Sessions:
    """Put the sessions of every device on the device's own clock."""
    if spans is None:
        spans = {name: [_whole_days(pairs)] for name, pairs in intervals.items()}
    for name in intervals:
        require(
            name in spans,
            f"Device '{name}' has sessions but no row in the csv of devices: add one.",
            key="visibility.trace_devices",
        )
    for name, pairs in spans.items():
        require(
            len(pairs) == 1,
            f"Device '{name}' has {len(pairs)} rows in the csv of devices: write one.",
            key="visibility.trace_devices",
        )
    names = sorted(spans)
    devices: list[int] = []
    sessions: list[Interval] = []
    for i, name in enumerate(names):
        for session in intervals.get(name, ()):
            devices.append(i)
            sessions.append(session)
    device = torch.tensor(devices)  # [S]
    start, end = torch.tensor(sessions, dtype=torch.float64).unbind(1)  # [S]
    limits = torch.tensor([spans[name][0] for name in names], dtype=torch.float64)  # [devices, 2]
    origin = limits[:, 0]
    span = (limits[:, 1] - limits[:, 0]).clamp(min=1)
    length = torch.where(end > start, end - start, 1.0)
    length = torch.minimum(length, span[device])
    start = (start - origin[device]) % span[device]
    return _Sessions(device, start, start + length, origin, span)


def _whole_days(pairs: Sequence[Interval]) -> Interval:
    """Return the span of a device's sessions, rounded up to whole days."""
    first = min(start for start, _ in pairs)
    last = max(end for _, end in pairs)
    days = max(1, math.ceil((last - first) / _DAY))
    return first, first + days * _DAY


def _load(source: str | Path | Intervals, columns: _Columns) -> Intervals:
    """Return the intervals of a csv or a mapping, never empty."""
    if isinstance(source, Mapping):
        return {name: pairs for name, pairs in source.items() if pairs}
    intervals = _read(Path(source), columns)
    require(bool(intervals), f"{source} holds no sessions: add at least one row.", key=columns.key)
    return intervals


def _read(path: Path, columns: _Columns) -> Intervals:
    """Read device, start and end from a csv; other columns are ignored."""
    key = columns.key
    intervals: dict[str, list[Interval]] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            for name in ("device", columns.start, columns.end):
                require(
                    name in (reader.fieldnames or ()),
                    f"{path}, line 1: no column '{name}'; the header must be "
                    f"device,{columns.start},{columns.end}.",
                    key=key,
                )
            for row in reader:
                line = f"{path}, line {reader.line_num}"
                interval = _interval(row, columns, line)
                intervals.setdefault(row["device"], []).append(interval)
    except OSError as error:
        raise UserError(
            f"Cannot read {key}={path} ({error.strerror}): give the path of a csv.", key=key
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{key}={path} is not a csv in UTF-8 ({error}): save it as UTF-8.", key=key
        ) from None
    return intervals


def _interval(row: Mapping[str, str], columns: _Columns, line: str) -> Interval:
    """Return the interval of one row, checked; `line` says where it stands."""
    start = _seconds(row, columns.start, columns, line)
    end = _seconds(row, columns.end, columns, line)
    if end < start:
        raise UserError(
            f"{line}: {columns.end}={end:g} is before {columns.start}={start:g}: swap them.",
            key=columns.key,
        )
    if not row["device"]:
        raise UserError(f"{line}: there is no device: write its name.", key=columns.key)
    return start, end


def _seconds(row: Mapping[str, str], column: str, columns: _Columns, line: str) -> float:
    text = row[column]
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not abs(value) <= _FARTHEST:
        raise UserError(
            f"{line}: {column}={text!r} is not a time: write seconds, e.g. 3600.", key=columns.key
        )
    return value
