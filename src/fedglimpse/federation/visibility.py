"""Who the server can see in a round.

A pattern is a small object with `visible(seed, round_num)`. Its answer depends on nothing else, so
lanes agree with runs on their own and resumed runs with uninterrupted ones; what an object
remembers between calls only saves time. Rounds count from 0.

To add a pattern: write its class here and one line in `BUILDERS`; say what it does in `PATTERNS` of
`config.py`, where its settings are. Patterns from recorded devices are in `traces.py`, those of
clients that differ in their rates or come late in `availability.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.errors import UserError, nearest, require
from fedglimpse.federation.availability import Churn, UnequalAvailability
from fedglimpse.federation.config import (
    PATTERNS,
    VisibilityConfig,
    count_clusters,
    largest_cluster,
)
from fedglimpse.federation.traces import DeviceTrace
from fedglimpse.plugins import load_callable
from fedglimpse.types import Visibility


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


@dataclass(frozen=True)
class RandomAvailability:
    """Every client is visible with probability `p`, independently; empty draws do not count.

    Only visible clients are drawn: the gap from one to the next is geometric. Sweeps over
    0..N-1 follow one another until one has a visible client, which is the distribution of
    redrawing empty sets, at a cost that does not grow with N or 1/p.
    """

    num_clients: int
    p: float

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the available clients, at least one."""
        source = rng.generator(seed, "visibility", round_num)
        mean = self.num_clients * self.p
        gaps_per_draw = int(mean + 6 * math.sqrt(mean)) + 16  # one draw nearly always suffices
        log_miss = torch.log1p(torch.tensor(-self.p, dtype=torch.float64))
        positions = torch.full((1,), -1.0, dtype=torch.float64)  # the first gap starts before 0
        sweep_end = math.inf  # where the first sweep with a visible client ends
        while positions[-1] < sweep_end:
            uniform = 1 - torch.rand(gaps_per_draw, generator=source, dtype=torch.float64)  # (0, 1]
            gaps = torch.floor(uniform.log() / log_miss) + 1
            positions = torch.cat([positions, positions[-1] + gaps.cumsum(0)])
            sweep_end = (positions[1].item() // self.num_clients + 1) * self.num_clients
        in_sweep = positions[1:][positions[1:] < sweep_end]
        return (in_sweep - (sweep_end - self.num_clients)).long()  # [V]


@dataclass(frozen=True)
class MarkovOnOff:
    """Clients that come and go: off -> on with `p_on`, on -> off with `p_off`, each round.

    Round 0 is drawn from the stationary distribution, P(on) = p_on / (p_on + p_off), so there is no
    warm-up; the correlation between rounds t and t + s is (1 - p_on - p_off)^s. Where no client is
    on, one uniformly drawn client is visible instead, and the chain continues unchanged. Rounds in
    order cost O(N) each; going back starts again from round 0.
    """

    num_clients: int
    p_on: float
    p_off: float
    _last: dict[int, tuple[int, Tensor]] = field(  # seed -> the last round and who was on
        default_factory=dict, init=False, repr=False, compare=False
    )

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the clients that are on."""
        ids = self._state(seed, round_num).nonzero().flatten()  # [V]
        if len(ids):
            return ids
        source = rng.generator(seed, "visibility-empty", round_num)
        return torch.randint(self.num_clients, (1,), generator=source)

    def _state(self, seed: int, round_num: int) -> Tensor:
        """Return which clients are on.  # [N] bool."""
        last_round, on = self._last.get(seed, (-1, None))
        if on is None or last_round > round_num:
            last_round = 0
            on = self._draw(seed, 0) < self.p_on / (self.p_on + self.p_off)
        for t in range(last_round + 1, round_num + 1):
            on = self._draw(seed, t) < torch.where(on, 1 - self.p_off, self.p_on)
        self._last[seed] = (round_num, on)
        return on

    def _draw(self, seed: int, round_num: int) -> Tensor:
        source = rng.generator(seed, "visibility", round_num)
        return torch.rand(self.num_clients, generator=source, dtype=torch.float64)  # [N]


# called with num_clients and the settings of the pattern by their names
BUILDERS: dict[str, Callable[..., Visibility]] = {
    "mobile": Clusters,
    "cyclic": partial(Clusters, order="cyclic"),
    "overlapping": Clusters,
    "random": RandomAvailability,
    "markov": MarkovOnOff,
    "unequal": UnequalAvailability,
    "churn": Churn,
    "trace": DeviceTrace,
    "full": Full,
}


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
    return BUILDERS[kind](num_clients=num_clients, **values)


def most_visible(visibility: Visibility, num_clients: int) -> int:
    """Return the most clients that a pattern can show in one round."""
    largest: int = getattr(visibility, "largest", num_clients)
    return largest


class UserPattern:
    """A user's own pattern, `visibility.kind=pkg.mod:factory`, with its answers checked.

    `factory(num_clients, settings)` returns an object with `visible(seed, round_num)`, whose answer
    is a tensor or a sequence of sorted client ids. What it draws from torch's global generator is
    the same for the same seed and round.
    """

    def __init__(self, settings: VisibilityConfig, num_clients: int) -> None:
        """Import the factory and call it."""
        self._name = f"visibility.kind={settings.kind}"
        self._num_clients = num_clients
        self._seeds_asked_twice: set[int] = set()
        with rng.isolated(0, "own visibility"):
            factory = load_callable(settings.kind, "visibility.kind")
            self._pattern: Any = factory(num_clients, settings)
        self._require(
            callable(getattr(self._pattern, "visible", None)),
            f"returned {type(self._pattern).__name__}, which has no method visible(seed, "
            "round_num): return an object that has one.",
        )

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the ids of the round's visible clients, checked."""
        ids = self._ask(seed, round_num)
        if seed not in self._seeds_asked_twice:  # once is enough to notice draws of its own
            self._seeds_asked_twice.add(seed)
            self._require(
                torch.equal(ids, self._ask(seed, round_num)),
                f"showed other clients when asked again for seed {seed} and round {round_num}: let "
                "its answer depend on these two alone, such as with "
                "np.random.default_rng([seed, round_num]).",
            )
        return ids

    def _ask(self, seed: int, round_num: int) -> Tensor:
        with rng.isolated(seed, "own visibility", round_num):
            answer = self._pattern.visible(seed, round_num)
        when = f"in round {round_num} of seed {seed}"
        try:
            ids = torch.as_tensor(answer)
        except (TypeError, ValueError, RuntimeError):
            ids = torch.empty(0, 0)  # neither a tensor nor numbers: refused below
        is_whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
        self._require(
            ids.dim() == 1 and (is_whole or not len(ids)),
            f"returned {type(answer).__name__} that is no list of whole numbers {when}: return "
            "client ids, such as a tensor of int64.",
        )
        self._require(len(ids) > 0, f"showed no client {when}: return at least one id.")
        ids = ids.long().cpu()
        smallest = int(ids.min())
        largest = int(ids.max())
        self._require(
            smallest >= 0 and largest < self._num_clients,
            f"showed ids from {smallest} to {largest} {when}: ids are 0 to "
            f"{self._num_clients - 1}.",
        )
        self._require(
            bool((ids[1:] > ids[:-1]).all()),
            f"showed clients {when} that are not sorted or appear twice: return sorted(set(ids)).",
        )
        return ids

    def _require(self, condition: bool, problem: str) -> None:
        require(condition, f"{self._name} {problem}", key="visibility.kind")
