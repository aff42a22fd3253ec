"""Who the server can see in a round: one small frozen class for every kind of visibility.

All satisfy `types.Visibility`: `visible(seed, round_num)` depends on nothing else, so lanes and
resumed runs agree. What an instance remembers between calls only saves time. Rounds count from 0.
Real traces are in `federation/traces.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.errors import UserError, nearest
from fedglimpse.federation.traces import Trace
from fedglimpse.types import Visibility

KINDS = ("mobile", "cyclic", "overlapping", "random", "markov", "trace", "full")


def _check_clients(num_clients: int) -> None:
    if num_clients < 1:
        raise UserError(f"A federation of {num_clients} clients is empty; use at least 1.")


def _check_rate(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise UserError(f"visibility.{name}={value} is not a probability in (0, 1]; try 0.1.")


@dataclass(frozen=True)
class Full:
    """Everybody is visible in every round: classical federated learning."""

    num_clients: int

    def __post_init__(self) -> None:
        _check_clients(self.num_clients)

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return all ids."""
        return torch.arange(self.num_clients)  # [N]


@dataclass(frozen=True)
class Overlapping:
    """Places on a ring of clients; neighbouring places share `overlap` clients.

    Clients stand on a ring in a random order that is fixed for a run. The ring is cut into
    round(N / (cluster_size - overlap)) arcs whose lengths differ by at most one, and a cluster is
    an arc with the first `overlap` clients of the next one, so every client is in at least one
    cluster. Each round shows one cluster: a uniformly random one, with repetition, or the next.
    """

    num_clients: int
    cluster_size: int
    overlap: int = 0
    order: Literal["random", "cyclic"] = "random"
    _rings: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _clusters: dict[tuple[int, int], Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _check_clients(self.num_clients)
        if not 1 <= self.cluster_size <= self.num_clients:
            raise UserError(
                f"visibility.cluster_size={self.cluster_size} does not fit {self.num_clients} "
                f"clients; choose 1 to {self.num_clients}."
            )
        if not 0 <= self.overlap < self.cluster_size:
            raise UserError(
                f"visibility.overlap={self.overlap} must be from 0 to {self.cluster_size - 1}, "
                f"less than visibility.cluster_size={self.cluster_size}."
            )
        if self.order not in ("random", "cyclic"):
            raise UserError(f"Cluster order '{self.order}' is unknown; use 'random' or 'cyclic'.")

    @property
    def num_clusters(self) -> int:
        """How many places the server can be at."""
        return max(1, round(self.num_clients / (self.cluster_size - self.overlap)))

    @property
    def largest(self) -> int:
        """How many clients the server sees at most."""
        return min(-(-self.num_clients // self.num_clusters) + self.overlap, self.num_clients)

    def cluster(self, seed: int, index: int) -> Tensor:
        """Return the sorted ids of one cluster of the run with this seed."""
        if (seed, index) not in self._clusters:
            self._clusters[seed, index] = self._arc(seed, index)
        return self._clusters[seed, index]  # [V]

    def _arc(self, seed: int, index: int) -> Tensor:
        """Cut one cluster out of the ring of the run with this seed."""
        if seed not in self._rings:
            self._rings[seed] = torch.randperm(
                self.num_clients, generator=rng.generator(seed, "clusters")
            )  # [N]
        start, stop = (-(-i * self.num_clients // self.num_clusters) for i in (index, index + 1))
        stop = min(stop + self.overlap, start + self.num_clients)
        return self._rings[seed][torch.arange(start, stop) % self.num_clients].sort().values  # [V]

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the cluster the server is at in this round."""
        if self.order == "cyclic":
            return self.cluster(seed, round_num % self.num_clusters)
        draw = torch.randint(
            self.num_clusters, (), generator=rng.generator(seed, "visibility", round_num)
        )
        return self.cluster(seed, int(draw))


@dataclass(frozen=True)
class MobileServer:
    """A server that moves between disjoint clusters and sees only the one it is at.

    The paper's setting. Clusters are random, fixed for a run, and balanced: there are
    round(N / cluster_size) of them, with sizes that differ by at most one.
    """

    num_clients: int
    cluster_size: int
    order: Literal["random", "cyclic"] = "random"
    places: Overlapping = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        clusters = Overlapping(self.num_clients, self.cluster_size, 0, self.order)
        object.__setattr__(self, "places", clusters)

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the cluster the server is at in this round."""
        return self.places.visible(seed, round_num)


@dataclass(frozen=True)
class RandomAvailability:
    """Every client is visible with probability `p`, independently; empty draws do not count.

    Clients are walked by geometric gaps, attempt after attempt over 0..N-1, until an attempt has
    seen somebody: the law of redrawing empty sets at the cost of the visible clients only, whatever
    N and however small p.
    """

    num_clients: int
    p: float

    def __post_init__(self) -> None:
        _check_clients(self.num_clients)
        _check_rate("p", self.p)

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the clients that happen to be available, at least one."""
        source = rng.generator(seed, "visibility", round_num)
        mean = self.num_clients * self.p
        width = int(mean + 6 * math.sqrt(mean)) + 16  # nearly always reaches the end at once
        log_miss = torch.log1p(torch.tensor(-self.p, dtype=torch.float64))
        hits = torch.full((1,), -1.0, dtype=torch.float64)  # the walk starts before client 0
        end = math.inf
        while hits[-1] < end:
            draws = 1 - torch.rand(width, generator=source, dtype=torch.float64)  # in (0, 1]
            gaps = torch.floor(draws.log() / log_miss) + 1
            hits = torch.cat([hits, hits[-1] + gaps.cumsum(0)])
            end = (hits[1].item() // self.num_clients + 1) * self.num_clients
        found = hits[1:][hits[1:] < end]
        return (found - (end - self.num_clients)).long()  # [V]


@dataclass(frozen=True)
class MarkovOnOff:
    """Clients that come and go: off -> on with `p_on`, on -> off with `p_off`, each round.

    Round 0 is drawn from the stationary law, P(on) = p_on / (p_on + p_off), so there is no warm-up;
    the correlation between rounds t and t + s is (1 - p_on - p_off)^s. Where nobody is on, one
    uniformly drawn client is visible instead, and the chain goes on unchanged. Rounds asked for
    in order cost O(N) each; going back starts again from round 0.
    """

    num_clients: int
    p_on: float
    p_off: float
    _last: dict[int, tuple[int, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _check_clients(self.num_clients)
        _check_rate("p_on", self.p_on)
        if not 0 <= self.p_off <= 1:
            raise UserError(
                f"visibility.p_off={self.p_off} is not a probability in [0, 1]; try 0.1."
            )

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the clients that are on."""
        now = self._state(seed, round_num).nonzero().flatten()  # [V]
        if len(now):
            return now
        source = rng.generator(seed, "visibility-empty", round_num)
        return torch.randint(self.num_clients, (1,), generator=source)

    def _state(self, seed: int, round_num: int) -> Tensor:
        """Return which clients are on.  # [N] bool."""
        at, on = self._last.get(seed, (-1, None))
        if on is None or at > round_num:
            at, on = 0, self._draw(seed, 0) < self.p_on / (self.p_on + self.p_off)
        for t in range(at + 1, round_num + 1):
            on = self._draw(seed, t) < torch.where(on, 1 - self.p_off, self.p_on)
        self._last[seed] = (round_num, on)
        return on

    def _draw(self, seed: int, round_num: int) -> Tensor:
        source = rng.generator(seed, "visibility", round_num)
        return torch.rand(self.num_clients, generator=source, dtype=torch.float64)  # [N]


def build_visibility(
    kind: str,
    num_clients: int,
    *,
    cluster_size: int,
    p: float,
    overlap: int,
    p_on: float,
    p_off: float,
    trace: str | Path,
    round_seconds: float,
    trace_devices: str | Path = "",
) -> Visibility:
    """Build the visibility called `kind`, one of `KINDS`; settings of other kinds are ignored.

    The settings are those of the classes; `trace` and `trace_devices` are csv files (see `Trace`).

    Raises:
        UserError: for an unknown kind or a value out of range.
    """
    match kind:
        case "mobile" | "cyclic":
            order: Literal["random", "cyclic"] = "random" if kind == "mobile" else "cyclic"
            return MobileServer(num_clients, cluster_size, order)
        case "overlapping":
            return Overlapping(num_clients, cluster_size, overlap)
        case "random":
            return RandomAvailability(num_clients, p)
        case "markov":
            return MarkovOnOff(num_clients, p_on, p_off)
        case "trace":
            if not trace:
                raise UserError(
                    "visibility.kind=trace needs a csv of sessions: set visibility.trace to its "
                    "path."
                )
            return Trace(trace, round_seconds, num_clients, devices=trace_devices or None)
        case "full":
            return Full(num_clients)
    raise UserError(
        f"Visibility '{kind}' is unknown.{nearest(kind, KINDS)} Known: {', '.join(KINDS)}."
    )
