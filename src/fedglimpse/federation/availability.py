"""Clients that are seen at rates of their own, and clients that come and leave for good."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.errors import require
from fedglimpse.federation.visibility import check_present, check_rates

_NEVER = torch.iinfo(torch.int64).max  # the round in which a client leaves that stays


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
