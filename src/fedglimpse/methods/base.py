"""What method files share: the setting they are built for, their description, small choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from fedglimpse.config.loading import options_of
from fedglimpse.config.schema import Config
from fedglimpse.errors import UserError
from fedglimpse.federation.aggregation import TemporalWindow
from fedglimpse.federation.reports import PERMISSION
from fedglimpse.types import Choice, Method, Outcome, View

T = TypeVar("T")

WEIGHTS = ("size", "uniform")  # how much an update counts: n_i / sum of n, or 1/K


@dataclass(frozen=True)
class Setting:
    """What a method may know when it is built, before the first round."""

    config: Config
    seed: int
    sizes: Tensor  # [N] local examples of every client
    num_classes: int
    num_params: int
    device: str = "cpu"  # where models are trained
    _options_read: list[type[Any]] = field(default_factory=list, compare=False, repr=False)

    @property
    def read_options(self) -> bool:
        """True where the method has looked at its options."""
        return bool(self._options_read)

    @property
    def own_options(self) -> dict[str, Any]:
        """`options.*` but for the permission to be an oracle, which any method can be given."""
        options = dict(self.config.options)
        options.pop(PERMISSION, None)
        return options

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.sizes)

    def options(self, cls: type[T], presets: Mapping[str, Mapping[str, Any]] | None = None) -> T:
        """Return the method's own options, `options.*`, as its dataclass.

        Args:
            cls: a dataclass of plain fields with defaults.
            presets: preset name -> values that differ from those defaults.
        """
        self._options_read.append(cls)
        if not is_dataclass(cls):
            raise UserError(
                f"setting.options({getattr(cls, '__name__', cls)}) is given no dataclass: write "
                "@dataclass(frozen=True) above the class.",
                key="method",
            )
        config = self.config
        if PERMISSION not in {item.name for item in fields(cls)}:
            config = replace(config, options=self.own_options)
        return cast(T, options_of(cls, config, (presets or {}).get(config.preset)))

    def temporal_window(self) -> TemporalWindow:
        """Return the paper's temporal averaging as configured in `aggregate.*`."""
        settings = self.config.aggregate
        return TemporalWindow(settings.window, settings.source)  # type: ignore[arg-type]


Build = Callable[[Setting], Method]


@dataclass(frozen=True)
class MethodInfo:
    """How a method presents itself in `fedglimpse methods`."""

    name: str
    summary: str
    source: str  # the article it comes from
    build: Build
    confidence: Literal["high", "medium", "low"] = "high"  # that we know the original's rules
    example_options: Mapping[str, Any] = field(default_factory=dict)  # options it cannot do without


class Stateless:
    """Defaults for a selector that asks for nothing and remembers nothing."""

    needs: frozenset[str] = frozenset()
    learns_from: frozenset[str] = frozenset()

    def feedback(self, outcome: Outcome) -> Mapping[str, float]:
        """Learn nothing, and record nothing."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, as `state` is empty."""


class UniformRandom(Stateless):
    """Chooses k visible clients uniformly at random, without replacement."""

    def __init__(self, weights: str = "size") -> None:
        """Count each update by its client's `size`, or all the same, `uniform`."""
        self.weights = weights

    def select(self, view: View, k: int) -> Choice:
        """Draw from the round's generator."""
        slots = random_slots(view, k)
        if self.weights == "size":
            return Choice(slots)
        return Choice(slots, weights_of(self.weights, slots), shares=True)


def weights_of(kind: str, slots: Tensor) -> Tensor | None:
    """Return a choice's weights: None for "size", 1/K for "uniform"."""
    if kind == "size":
        return None
    return torch.full((len(slots),), 1 / len(slots), dtype=torch.float64)  # [K]


def random_slots(view: View, k: int) -> Tensor:
    """Return min(k, V) distinct slots in random order."""
    return torch.randperm(len(view.ids), generator=view.rng)[:k]


def top_slots(scores: Tensor | Sequence[float], k: int, generator: torch.Generator) -> Tensor:
    """Return the min(k, V) best slots, best first; ties are broken at random, not by index.

    A score that is not a number is the worst.
    """
    values = torch.as_tensor(scores).detach().cpu().double().numpy()
    shuffled = torch.randperm(len(values), generator=generator).numpy()[::-1]
    shuffled_values = values[shuffled]
    comparable = np.where(np.isnan(shuffled_values), -np.inf, shuffled_values)
    worst_first = np.argsort(comparable, kind="stable")
    best_first = worst_first[::-1]  # which also puts the first drawn of equal ones first
    return torch.from_numpy(shuffled[best_first[:k]])
