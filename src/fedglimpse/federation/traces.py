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
from fedglimpse.errors import UserError

_DAY = 86_400.0
_FARTHEST = 1e12  # seconds, thirty thousand years: beyond it, clocks lose their seconds
Intervals = Mapping[str, Sequence[tuple[float, float]]]  # device -> (start, end), seconds


class _Table(NamedTuple):
    """All sessions, device by device; sessions are relative to the start of the device's trace."""

    device: Tensor  # [S] index of the device
    start: Tensor  # [S] in [0, span of the device)
    end: Tensor  # [S] up to one span after the start
    origin: Tensor  # [devices] when the trace of a device begins
    span: Tensor  # [devices] after how many seconds it begins again


class _Replay(NamedTuple):
    """The sessions of all clients of one run."""

    client: Tensor  # [S] id
    start: Tensor  # [S]
    end: Tensor  # [S]
    span: Tensor  # [S]
    clock: Tensor  # [S] the client's time in its trace when round 0 begins


@dataclass(frozen=True)
class Trace:
    """Clients follow recorded devices: visible in a round if ready at any time within it.

    A run draws N devices without replacement; with fewer devices than clients the others reuse a
    device with a random time shift. Every device repeats its own trace, and all clocks move
    together, so hours of the day stay aligned between devices whose traces span whole days. Where
    nobody is ready the server waits for the first later window in which somebody is.

    Attributes:
        source: a csv with the columns device, ready_start_s, ready_end_s, or the same as a mapping
            from device to (start, end) pairs. A session of no length counts as one second.
        round_seconds: how long the server looks in a round.
        num_clients: N.
        start: seconds on the trace clock at which round 0 begins; None draws it for each run.
        devices: a csv with the columns device, trace_start_s, trace_end_s, or the same as a
            mapping to one pair. Without it a trace goes from the first start to the last end of
            the device's sessions, rounded up to whole days. A device without sessions is never
            visible.
    """

    source: str | Path | Intervals
    round_seconds: float
    num_clients: int
    start: float | None = None
    devices: str | Path | Intervals | None = None
    _table: _Table = field(init=False, repr=False, compare=False)
    _windows: dict[int, list[int]] = field(  # seed -> the window of each round
        default_factory=dict, init=False, repr=False, compare=False
    )
    _replays: dict[int, _Replay] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.num_clients < 1:
            raise UserError(f"A federation of {self.num_clients} clients is empty; use at least 1.")
        if not 0 < self.round_seconds < math.inf:
            raise UserError(
                f"visibility.round_seconds={self.round_seconds} must be positive; try 600."
            )
        spans = None
        if self.devices is not None:
            spans = _load(self.devices, "trace_start_s", "trace_end_s")
        sessions = _load(self.source, "ready_start_s", "ready_end_s")
        object.__setattr__(self, "_table", _tabulate(sessions, spans))

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the clients that are ready in the round's window.

        Windows in which nobody is ready are no rounds: round r is the r-th of the others.
        """
        if seed not in self._replays:
            self._replays[seed], self._windows[seed] = self._cast(seed), []
        replay, windows = self._replays[seed], self._windows[seed]
        while len(windows) <= round_num:
            windows.append(self._next_window(replay, windows[-1] + 1 if windows else 0))
        ready = self._ready(replay, windows[round_num])
        return torch.unique_consecutive(replay.client[ready])  # [V] sorted

    def _next_window(self, replay: _Replay, window: int) -> int:
        """Return the first window, from this one on, in which somebody is ready."""
        while not self._ready(replay, window).any():
            now = (replay.clock + window * self.round_seconds) % replay.span  # [S]
            wait = float(((replay.start - now) % replay.span).min())
            window += max(1, int(wait // self.round_seconds))
        return window

    def _ready(self, replay: _Replay, window: int) -> Tensor:
        """Return which sessions `[S]` reach into a window."""
        width = torch.clamp(replay.span, max=self.round_seconds)  # [S] a longer look sees it all
        now = (replay.clock + window * self.round_seconds) % replay.span  # [S]
        ready = torch.zeros_like(replay.client, dtype=torch.bool)  # [S]
        for turn in (-replay.span, 0.0, replay.span):  # windows and sessions cross the wrap
            ready |= (replay.start + turn < now + width) & (replay.end + turn > now)
        return ready

    def _cast(self, seed: int) -> _Replay:
        """Give every client a device, and every clock its start."""
        table, source = self._table, rng.generator(seed, "trace")
        count = len(table.span)
        turns = -(-self.num_clients // count)
        order = torch.cat([torch.randperm(count, generator=source) for _ in range(turns)])
        device = order[: self.num_clients]  # [N]
        shift = torch.rand(self.num_clients, generator=source, dtype=torch.float64)
        shift = (shift * table.span[device]).floor()  # [N]
        shift[:count] = 0  # the first use of a device keeps its own clock
        drawn = torch.rand((), generator=source, dtype=torch.float64)
        start = self.start
        if start is None:
            start = float(table.origin.min() + (drawn * table.span.max()).floor())
        clock = start - table.origin[device] + shift  # [N]

        lengths = torch.bincount(table.device, minlength=count)  # [devices]
        per_client = lengths[device]  # [N]
        client = torch.repeat_interleave(torch.arange(self.num_clients), per_client)  # [S']
        if not len(client):
            raise UserError(
                f"None of the {self.num_clients} devices drawn with seed {seed} is ever ready; "
                "use more clients, another seed, or a trace without idle devices."
            )
        within = torch.arange(len(client)) - (per_client.cumsum(0) - per_client)[client]
        row = (lengths.cumsum(0) - lengths)[device][client] + within  # [S'] into the table
        span = table.span[device][client]
        return _Replay(client, table.start[row], table.end[row], span, clock[client])


def _tabulate(sessions: Intervals, spans: Intervals | None) -> _Table:
    """Put sessions on their device's own clock."""
    if spans is None:
        spans = {name: [_whole_days(pairs)] for name, pairs in sessions.items()}
    for name in sessions:
        if name not in spans:
            raise UserError(f"Device '{name}' has sessions but no row in the csv of devices.")
    for name, rows_of_it in spans.items():
        if len(rows_of_it) > 1:
            raise UserError(
                f"Device '{name}' has {len(rows_of_it)} rows in the csv of devices; write one."
            )
    names = sorted(spans)
    rows = [(i, *pair) for i, name in enumerate(names) for pair in sessions.get(name, ())]
    device = torch.tensor([row[0] for row in rows])  # [S]
    start, end = torch.tensor([row[1:] for row in rows], dtype=torch.float64).unbind(1)  # [S]
    limits = torch.tensor([spans[name][0] for name in names], dtype=torch.float64)  # [devices, 2]
    origin, span = limits[:, 0], (limits[:, 1] - limits[:, 0]).clamp(min=1)
    length = torch.where(end > start, end - start, 1.0)
    start = (start - origin[device]) % span[device]
    return _Table(device, start, start + torch.minimum(length, span[device]), origin, span)


def _whole_days(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    first, last = min(start for start, _ in pairs), max(end for _, end in pairs)
    return first, first + max(1, math.ceil((last - first) / _DAY)) * _DAY


def _load(source: str | Path | Intervals, first: str, last: str) -> Intervals:
    """Return checked intervals from a csv or a mapping, never empty."""
    if isinstance(source, Mapping):
        found: Intervals = {str(name): list(pairs) for name, pairs in source.items() if pairs}
        for name, pairs in found.items():
            for start, end in pairs:
                if not start <= end:
                    raise UserError(f"Device '{name}' has a session that ends before it starts.")
        where = "The given trace"
    else:
        found, where = _read(Path(source), first, last), str(source)
    if not found:
        raise UserError(f"{where} holds no sessions; give at least one row.")
    return found


def _read(path: Path, first: str, last: str) -> Intervals:
    """Read device, start and end from a csv; other columns are ignored."""
    found: dict[str, list[tuple[float, float]]] = {}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            for name in ("device", first, last):
                if name not in (reader.fieldnames or ()):
                    raise UserError(
                        f"{path}, line 1: no column '{name}'; the header must be "
                        f"device,{first},{last}."
                    )
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                start, end = (_seconds(row[name], name, where) for name in (first, last))
                if end < start:
                    raise UserError(f"{where}: {last}={end:g} is before {first}={start:g}; swap.")
                if not row["device"]:
                    raise UserError(f"{where}: there is no device; write its name.")
                found.setdefault(row["device"], []).append((start, end))
    except OSError as error:
        raise UserError(
            f"Cannot read the trace {path} ({error.strerror}): give a csv that is there as "
            "visibility.trace or visibility.trace_devices."
        ) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"The trace {path} is not a csv in UTF-8 ({error}): save it as UTF-8."
        ) from None
    return found


def _seconds(text: str | None, name: str, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not abs(value) <= _FARTHEST:
        raise UserError(f"{where}: {name}={text!r} is not a time; write seconds, e.g. 3600.")
    return value
