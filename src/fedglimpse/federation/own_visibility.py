"""A user's own visibility pattern, `visibility.kind=pkg.mod:factory`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.errors import require
from fedglimpse.federation.visibility import VisibilityConfig
from fedglimpse.plugins import has_values, load_callable


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
            if not has_values(ids):
                raise TypeError
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
