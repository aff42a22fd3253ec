"""The settings `visibility.*`, the patterns there are, and which sizes fit.

Imports no torch, so that a mistake is answered at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fedglimpse.errors import require
from fedglimpse.fields import setting


class Pattern(NamedTuple):
    """What to know of `visibility.kind=NAME`; its class is in `visibility.py`."""

    meaning: str  # who is visible in a round, for the table of docs/data.md
    settings: tuple[str, ...] = ()  # the fields of `VisibilityConfig` that it reads

    @property
    def clustered(self) -> bool:
        """True where the server sees one cluster of clients."""
        return "cluster_size" in self.settings


PATTERNS: dict[str, Pattern] = {
    "mobile": Pattern(
        "fixed random clusters of `visibility.cluster_size`, a random one each round",
        settings=("cluster_size",),
    ),
    "cyclic": Pattern(
        "the same clusters, one after the other",
        settings=("cluster_size",),
    ),
    "overlapping": Pattern(
        "clusters on a ring, a random one each round; neighbours share `visibility.overlap` "
        "clients",
        settings=("cluster_size", "overlap"),
    ),
    "random": Pattern(
        "each client with probability `visibility.p`; empty rounds are redrawn",
        settings=("p",),
    ),
    "markov": Pattern(
        "clients wake up with `visibility.p_on` and fall asleep with `visibility.p_off`; a share "
        "p_on / (p_on + p_off) is awake, and where nobody is, one client drawn at random is "
        "visible",
        settings=("p_on", "p_off"),
    ),
    "unequal": Pattern(
        "each client with a probability of its own between `visibility.p_low` and "
        "`visibility.p_high`, see [unequal clients](#unequal-clients); empty rounds are redrawn",
        settings=("p_low", "p_high", "rates", "rates_by"),
    ),
    "churn": Pattern(
        "`visibility.present` clients are there, each one visible with probability `visibility.p`; "
        "they leave for good and others replace them, see [clients that come and "
        "leave](#clients-that-come-and-leave); empty rounds are redrawn",
        settings=("present", "lifetime", "p"),
    ),
    "trace": Pattern(
        "the clients whose recorded device is ready at some time in the round, see "
        "[traces](#traces)",
        settings=("trace", "trace_devices", "round_seconds"),
    ),
    "full": Pattern("everybody"),
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


def check_rates(p_low: float, p_high: float) -> None:
    """Raise UserError for probabilities that do not fall."""
    require(
        p_low <= p_high,
        f"visibility.p_low={p_low} is more than visibility.p_high={p_high}: swap them, or lower "
        "visibility.p_low.",
        key="visibility.p_low",
    )


def check_present(present: int, num_clients: int) -> None:
    """Raise UserError for more clients at a time than there are."""
    require(
        1 <= present <= num_clients,
        f"visibility.present={present} does not fit {num_clients} clients: use 1 to {num_clients}.",
        key="visibility.present",
    )
