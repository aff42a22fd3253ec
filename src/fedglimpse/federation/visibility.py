"""Who the server can see in a round: the patterns, and their settings `visibility.*`.

A pattern is a small object with `visible(seed, round_num)`. Its answer depends on nothing else, so
lanes agree with runs on their own and resumed runs with uninterrupted ones; what an object
remembers between calls only saves time. Rounds count from 0.

To add a pattern: write its class here, one entry of `PATTERNS`, and a field of `VisibilityConfig`
for each setting of its own. Patterns in which clients come and go by themselves are in
`availability.py`, those of recorded devices in `traces.py`, a user's own in `own_visibility.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fedglimpse.errors import UserError, nearest, require
from fedglimpse.federation.availability import (
    Churn,
    MarkovOnOff,
    RandomAvailability,
    UnequalAvailability,
    check_present,
    check_rates,
)
from fedglimpse.fields import setting
from fedglimpse.plugins import ImportedOnUse

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedglimpse import rng
    from fedglimpse.types import Visibility
else:  # settings are read and checked without waiting for torch
    torch = ImportedOnUse("torch")
    rng = ImportedOnUse("fedglimpse.rng")


@dataclass(frozen=True)
class Full:
    """Every client is visible in every round: classical federated learning."""

    num_clients: int

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return all ids."""
        return torch.arange(self.num_clients)  # [N]


@dataclass(frozen=True)
class Clusters:
    """A server that moves between clusters of clients and sees only the one it is at.

    Clients stand on a ring in a random order that is fixed for a run. The ring is cut into
    round(N / (cluster_size - overlap)) arcs whose lengths differ by at most one, and a cluster is
    an arc with the first `overlap` clients of the next one, so every client is in at least one
    cluster. Without overlap, the paper's setting, clusters are disjoint. Each round shows one
    cluster: a uniformly random one, with repetition, or the next.
    """

    num_clients: int
    cluster_size: int
    overlap: int = 0
    order: Literal["random", "cyclic"] = "random"
    num_clusters: int = field(init=False)
    largest: int = field(init=False)  # how many clients are visible at most
    _rings: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _visited: dict[tuple[int, int], Tensor] = field(  # the clusters by seed and index
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        sizes = (self.num_clients, self.cluster_size, self.overlap)
        object.__setattr__(self, "num_clusters", count_clusters(*sizes))
        object.__setattr__(self, "largest", largest_cluster(*sizes))

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the cluster the server is at in this round."""
        if self.order == "cyclic":
            index = round_num % self.num_clusters
        else:
            source = rng.generator(seed, "visibility", round_num)
            index = int(torch.randint(self.num_clusters, (), generator=source))
        if (seed, index) not in self._visited:
            self._visited[seed, index] = self.cluster(seed, index)
        return self._visited[seed, index]  # [V]

    def cluster(self, seed: int, index: int) -> Tensor:
        """Return the sorted ids of one cluster of the run with this seed."""
        start = self._arc_start(index)
        stop = min(self._arc_start(index + 1) + self.overlap, start + self.num_clients)
        positions = torch.arange(start, stop) % self.num_clients
        return self._ring(seed)[positions].sort().values

    def _ring(self, seed: int) -> Tensor:
        """Return the order of the clients on the ring of the run with this seed.  # [N]."""
        if seed not in self._rings:
            source = rng.generator(seed, "clusters")
            self._rings[seed] = torch.randperm(self.num_clients, generator=source)
        return self._rings[seed]

    def _arc_start(self, index: int) -> int:
        return -(-index * self.num_clients // self.num_clusters)  # rounded up


def count_clusters(num_clients: int, cluster_size: int, overlap: int) -> int:
    """Return into how many clusters a ring of clients is cut.

    Args:
        num_clients: N.
        cluster_size: clients of a cluster, about.
        overlap: how many of them are in the next cluster, too.

    Raises:
        UserError: for sizes that do not fit each other.
    """
    require(
        1 <= cluster_size <= num_clients,
        f"visibility.cluster_size={cluster_size} does not fit {num_clients} clients: use 1 to "
        f"{num_clients}.",
        key="visibility.cluster_size",
    )
    require(
        0 <= overlap < cluster_size,
        f"visibility.overlap={overlap} must be less than visibility.cluster_size={cluster_size}: "
        f"use 0 to {cluster_size - 1}.",
        key="visibility.overlap",
    )
    return max(1, round(num_clients / (cluster_size - overlap)))


def largest_cluster(num_clients: int, cluster_size: int, overlap: int) -> int:
    """Return how many clients the largest of these clusters has."""
    longest_arc = math.ceil(num_clients / count_clusters(num_clients, cluster_size, overlap))
    return min(longest_arc + overlap, num_clients)


def _trace(**settings: Any) -> Visibility:
    """Build the pattern of recorded devices, whose module reads files with NumPy and torch."""
    from fedglimpse.federation.traces import DeviceTrace

    return DeviceTrace(**settings)


class Pattern(NamedTuple):
    """What to know of `visibility.kind=NAME`."""

    build: Callable[..., Visibility]  # called with num_clients and the settings by their names
    meaning: str  # who is visible in a round, for the table of docs/data.md
    settings: tuple[str, ...] = ()  # the fields of `VisibilityConfig` that it reads

    @property
    def clustered(self) -> bool:
        """True where the server sees one cluster of clients."""
        return "cluster_size" in self.settings


PATTERNS: dict[str, Pattern] = {
    "mobile": Pattern(
        Clusters,
        "fixed random clusters of `visibility.cluster_size`, a random one each round",
        settings=("cluster_size",),
    ),
    "cyclic": Pattern(
        partial(Clusters, order="cyclic"),
        "the same clusters, one after the other",
        settings=("cluster_size",),
    ),
    "overlapping": Pattern(
        Clusters,
        "clusters on a ring, a random one each round; neighbours share `visibility.overlap` "
        "clients",
        settings=("cluster_size", "overlap"),
    ),
    "random": Pattern(
        RandomAvailability,
        "each client with probability `visibility.p`; empty rounds are redrawn",
        settings=("p",),
    ),
    "markov": Pattern(
        MarkovOnOff,
        "clients wake up with `visibility.p_on` and fall asleep with `visibility.p_off`; a share "
        "p_on / (p_on + p_off) is awake, and where nobody is, one client drawn at random is "
        "visible",
        settings=("p_on", "p_off"),
    ),
    "unequal": Pattern(
        UnequalAvailability,
        "each client with a probability of its own between `visibility.p_low` and "
        "`visibility.p_high`, see [unequal clients](#unequal-clients); empty rounds are redrawn",
        settings=("p_low", "p_high", "rates", "rates_by"),
    ),
    "churn": Pattern(
        Churn,
        "`visibility.present` clients are there, each one visible with probability `visibility.p`; "
        "they leave for good and others replace them, see [clients that come and "
        "leave](#clients-that-come-and-leave); empty rounds are redrawn",
        settings=("present", "lifetime", "p"),
    ),
    "trace": Pattern(
        _trace,
        "the clients whose recorded device is ready at some time in the round, see "
        "[traces](#traces)",
        settings=("trace", "trace_devices", "round_seconds"),
    ),
    "full": Pattern(Full, "everybody"),
}


@dataclass(frozen=True)
class VisibilityConfig:
    """`visibility.*`: who can be seen in a round."""

    kind: str = setting(
        "mobile",
        "the pattern of who is visible when, see docs/data.md",
        choices=PATTERNS,
        plugin=True,
    )
    cluster_size: int = setting(
        10, "of mobile, cyclic and overlapping: clients at one place", at_least=1
    )
    overlap: int = setting(
        2, "of overlapping: clients that neighbouring clusters share", at_least=0
    )
    p: float = setting(
        0.1,
        "of random and churn: probability of a client (that is there) to be visible in a round",
        above=0,
        at_most=1,
    )
    p_low: float = setting(
        0.01, "of unequal: probability of the client seen least", above=0, at_most=1
    )
    p_high: float = setting(
        0.5, "of unequal: probability of the client seen most", above=0, at_most=1
    )
    rates: str = setting(
        "geometric",
        "of unequal: how probabilities fall from p_high to p_low, by equal factors or as a power "
        "of the rank",
        choices=("geometric", "zipf"),
    )
    rates_by: str = setting(
        "random",
        "of unequal: who is seen more, at random or the clients whose most frequent label is lower",
        choices=("random", "label"),
    )
    present: int = setting(25, "of churn: clients that are there in a round", at_least=1)
    lifetime: float = setting(
        100.0,
        "of churn: rounds for which a client is there, in the mean",
        at_least=1,
        at_most=1_000_000,
    )
    p_on: float = setting(
        0.05,
        "of markov: probability that a sleeping client wakes up in a round",
        above=0,
        at_most=1,
    )
    p_off: float = setting(
        0.45,
        "of markov: probability that a client awake falls asleep in a round",
        at_least=0,
        at_most=1,
    )
    trace: str = setting("", "of trace: csv of device,ready_start_s,ready_end_s")
    trace_devices: str = setting(
        "", "of trace: csv of device,trace_start_s,trace_end_s, if there is one"
    )
    round_seconds: float = setting(600.0, "of trace: seconds of a round", above=0)
    min_visible: int = setting(
        1, "rounds with fewer visible clients pass without training", at_least=1
    )


def check_visibility(settings: VisibilityConfig) -> None:
    """Raise UserError for a file that the chosen kind does not read, or rates that do not fall."""
    if settings.kind == "unequal":
        check_rates(settings.p_low, settings.p_high)
    pattern = PATTERNS.get(settings.kind)
    if pattern is None:
        return  # a user's own pattern may read every setting
    for name in ("trace", "trace_devices"):
        file = getattr(settings, name)
        require(
            not file or name in pattern.settings,
            f"visibility.{name}={file} has no effect with visibility.kind={settings.kind}: add "
            "visibility.kind=trace, or leave it out.",
            key=f"visibility.{name}",
        )


def check_sizes(settings: VisibilityConfig, num_clients: int) -> None:
    """Raise UserError for sizes that do not fit the number of clients; reads no file."""
    largest = num_clients
    pattern = PATTERNS.get(settings.kind)
    if pattern is not None and pattern.clustered:
        overlap = settings.overlap if "overlap" in pattern.settings else 0
        largest = largest_cluster(num_clients, settings.cluster_size, overlap)
    if settings.kind == "churn":
        check_present(settings.present, num_clients)
        largest = settings.present
    require(
        settings.min_visible <= largest,
        f"visibility.min_visible={settings.min_visible} can never be met, since at most {largest} "
        f"clients are visible: use at most {largest}.",
        key="visibility.min_visible",
    )


def build_visibility(
    settings: VisibilityConfig, num_clients: int, main_labels: Callable[[], Tensor] | None = None
) -> Visibility:
    """Build the pattern `settings.kind`, one of `PATTERNS` or a user's own `pkg.mod:factory`.

    Args:
        settings: `visibility.*`.
        num_clients: N.
        main_labels: returns the most frequent label of each client `[N]`; None: nobody knows them.

    Raises:
        UserError: for an unknown kind or settings that it cannot work with.
    """
    kind = settings.kind
    if ":" in kind:
        from fedglimpse.federation.own_visibility import UserPattern  # needs torch

        return UserPattern(settings, num_clients)
    if kind not in PATTERNS:
        raise UserError(
            f"visibility.kind={kind} is unknown.{nearest(kind, PATTERNS)} Use "
            f"{', '.join(PATTERNS)}, or your own as package.module:factory.",
            key="visibility.kind",
        )
    values = {name: getattr(settings, name) for name in PATTERNS[kind].settings}
    if kind == "unequal":
        values["main_labels"] = main_labels
    return PATTERNS[kind].build(num_clients=num_clients, **values)


def most_visible(visibility: Visibility, num_clients: int) -> int:
    """Return the most clients that a pattern can show in one round."""
    largest: int = getattr(visibility, "largest", num_clients)
    return largest
