"""Visibility patterns in which every client comes and goes by itself.

Each client with one probability, on and off for a while, with a rate of its own, or there for a
time and then gone for good.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fedglimpse.errors import require
from fedglimpse.plugins import ImportedOnUse

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedglimpse import rng
else:  # settings are read and checked without waiting for torch
    torch = ImportedOnUse("torch")
    rng = ImportedOnUse("fedglimpse.rng")

_NEVER = 2**63 - 1  # the round in which a client leaves that stays


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


@dataclass(frozen=True)
class UnequalAvailability:
    """Client i is visible with its own probability p_i, independently of the others.

    The probabilities fall from `p_high` to `p_low` over the ranks 0..N-1 of the clients:
    geometrically, by the same factor from each rank to the next, or as a power of the rank counted
    from 1 (Zipf), so that few clients are seen often. Ranks are random and fixed for a run, or in
    the order of the clients' most frequent labels, at random within a label: the clients of the
    last labels are then rarely seen, and with them their classes. Empty draws do not count.
    """

    num_clients: int
    p_low: float
    p_high: float
    rates: Literal["geometric", "zipf"] = "geometric"
    rates_by: Literal["random", "label"] = "random"
    main_labels: Callable[[], Tensor] | None = None  # most frequent label of each client  # [N]
    _probabilities: dict[int, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_rates(self.p_low, self.p_high)
        require(
            self.rates_by != "label" or self.main_labels is not None,
            "visibility.rates_by=label needs the labels of every client, and a server of devices "
            "does not know them: use visibility.rates_by=random.",
            key="visibility.rates_by",
        )

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the available clients, at least one."""
        return self.schedule(seed, [round_num])[0].nonzero().flatten()  # [V]

    def schedule(self, seed: int, rounds: Sequence[int]) -> Tensor:
        """Return who is visible in each of these rounds.  # [T, N] bool."""
        probabilities = self.probabilities(seed).expand(len(rounds), -1)
        return draw_visible(probabilities, seed, rounds)

    def probabilities(self, seed: int) -> Tensor:
        """Return the probability of each client in the run with this seed.  # [N] float64."""
        if seed not in self._probabilities:
            probabilities = torch.empty(self.num_clients, dtype=torch.float64)
            probabilities[self._ranking(seed)] = self._falling()
            self._probabilities[seed] = probabilities
        return self._probabilities[seed]

    def _ranking(self, seed: int) -> Tensor:
        """Return the ids of the clients, the most visible first.  # [N]."""
        shuffled = torch.randperm(self.num_clients, generator=rng.generator(seed, "rates"))
        if self.rates_by == "random" or self.main_labels is None:
            return shuffled
        labels = self.main_labels()[shuffled]
        return shuffled[labels.argsort(stable=True)]

    def _falling(self) -> Tensor:
        """Return the probability of each rank.  # [N] float64."""
        ranks = torch.arange(self.num_clients, dtype=torch.float64)
        steps = ranks if self.rates == "geometric" else (ranks + 1).log()
        share = steps / steps[-1].clamp(min=1e-9)  # from 0 at the first rank to 1 at the last
        probabilities = self.p_high * (self.p_low / self.p_high) ** share
        return probabilities.clamp(self.p_low, self.p_high)  # against rounding


@dataclass(frozen=True)
class Churn:
    """Clients that come once, stay for a while and leave for good; others take their places.

    In every round `present` clients are there. After each round each of them leaves with
    probability 1 / lifetime, so that stays are geometric with mean `lifetime`, and a client that
    has never been there replaces it from the next round on. When all N have come, those who are
    there stay. The order of arrival is random and fixed for a run. Each of those who are there is
    visible with probability `p`, independently; empty draws do not count.
    """

    num_clients: int
    present: int
    lifetime: float
    p: float
    _stays: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_present(self.present, self.num_clients)

    @property
    def largest(self) -> int:
        """How many clients are visible at most."""
        return self.present

    def visible(self, seed: int, round_num: int) -> Tensor:
        """Return the available clients, at least one."""
        return self.schedule(seed, [round_num])[0].nonzero().flatten()  # [V]

    def schedule(self, seed: int, rounds: Sequence[int]) -> Tensor:
        """Return who is visible in each of these rounds.  # [T, N] bool."""
        first, end = self.stays(seed)
        when = torch.tensor(rounds)[:, None]  # [T, 1]
        is_present = (first <= when) & (when < end)  # [T, N]
        return draw_visible(is_present * self.p, seed, rounds)

    def arrivals(self, seed: int) -> Tensor:
        """Return the first round of each client, which may be later than a run ends.  # [N]."""
        return self.stays(seed)[0]

    def stays(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return the first round of each client, and the one in which it is gone.  # [N] each."""
        if seed not in self._stays:
            self._stays[seed] = self._draw_stays(seed)
        return self._stays[seed]

    def _draw_stays(self, seed: int) -> tuple[Tensor, Tensor]:
        """Let the clients come one after the other, whenever a place becomes free."""
        ids = torch.randperm(self.num_clients, generator=rng.generator(seed, "arrivals"))
        order = ids.tolist()
        lifetimes = self._draw_lifetimes(seed)
        first = [0] * self.num_clients
        end = [_NEVER] * self.num_clients
        places = list(zip(lifetimes[: self.present], order[: self.present], strict=True))
        heapq.heapify(places)  # (the round in which the client is gone, the client)
        for lifetime, client in zip(lifetimes[self.present :], order[self.present :], strict=True):
            free_from, leaving = heapq.heappop(places)
            first[client] = free_from
            end[leaving] = free_from
            heapq.heappush(places, (free_from + lifetime, client))
        return torch.tensor(first), torch.tensor(end)

    def _draw_lifetimes(self, seed: int) -> list[int]:
        """Return for how many rounds clients would stay, in the order of arrival.  # [N].

        If U is uniform, 1 + floor(log U / log(1 - 1 / lifetime)) is geometric.
        """
        key = torch.tensor([rng.key(seed, "lifetimes")])
        uniform = 1 - rng.uniform(key, 0, self.num_clients)[0]  # (0, 1]
        stays = torch.tensor(1 - 1 / self.lifetime, dtype=torch.float64)
        further_rounds = (rng.log(uniform) / rng.log(stays)).floor()
        lifetimes: list[int] = (1 + further_rounds.long()).tolist()
        return lifetimes


def draw_visible(probabilities: Tensor, seed: int, rounds: Sequence[int]) -> Tensor:
    """Draw who is visible in each round: all clients independently, and at least one of them.

    Where nobody would be visible the draw is repeated among the sets that are not empty, which is
    the distribution of drawing until one is visible, however small the probabilities are.

    Args:
        probabilities: of each client in each round.  # [T, N] float64
        seed: of the run.
        rounds: their numbers.

    Returns:
        Who is visible.  # [T, N] bool
    """
    num_clients = probabilities.shape[1]
    keys = torch.tensor([rng.key(seed, "visibility", t) for t in rounds])  # [T]
    shown = rng.uniform(keys, 0, num_clients) < probabilities
    empty = ~shown.any(1)
    if empty.any():
        shown[empty] = _draw_some(probabilities[empty], keys[empty])
    return shown


def _draw_some(probabilities: Tensor, keys: Tensor) -> Tensor:
    """Draw sets that are not empty: first who is the first of the set, then the clients after it.

    Args:
        probabilities: of each client in each round.  # [T, N] float64
        keys: one for each round.  # [T]
    """
    num_clients = probabilities.shape[1]
    none_so_far = torch.log1p(-probabilities).cumsum(1)  # [T, N] logarithm
    first_is_by_now = -torch.expm1(none_so_far)  # [T, N] P(one of the clients up to here)
    level = rng.uniform(keys, 1, 1) * first_is_by_now[:, -1:]  # [T, 1]
    first = torch.searchsorted(first_is_by_now, level, right=True)  # [T, 1]
    later = torch.arange(num_clients) > first
    shown = later & (rng.uniform(keys, 2, num_clients) < probabilities)
    return shown.scatter(1, first, True)


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
