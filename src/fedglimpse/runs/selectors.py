"""The selectors of a world's lanes: asked together where they can be, else one by one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from fedglimpse.types import Choice, Outcome, Selector, View


class Team(Protocol):
    """Selectors that choose and learn in one go; lanes that sit out are None."""

    def select(self, views: Sequence[View | None], ks: Sequence[int]) -> Sequence[Choice | None]:
        """Choose in every lane that sees someone."""

    def feedback(self, outcomes: Sequence[Outcome | None]) -> Sequence[Mapping[str, float]]:
        """Learn in every lane that played."""


class OneByOne:
    """A team of any selectors."""

    def __init__(self, selectors: Sequence[Selector]) -> None:
        self.selectors = selectors

    def select(self, views: Sequence[View | None], ks: Sequence[int]) -> list[Choice | None]:
        """Ask every selector that sees someone."""
        return [
            None if view is None else selector.select(view, k)
            for selector, view, k in zip(self.selectors, views, ks, strict=True)
        ]

    def feedback(self, outcomes: Sequence[Outcome | None]) -> list[Mapping[str, float]]:
        """Tell every selector that played."""
        return [
            {} if outcome is None else selector.feedback(outcome)
            for selector, outcome in zip(self.selectors, outcomes, strict=True)
        ]


class Crew:
    """All selectors of a world, in teams.

    A selector may offer `group_key`, equal for selectors that can be asked together, and a class
    method `group(selectors)` that returns the `Team`.
    """

    def __init__(self, selectors: Sequence[Selector]) -> None:
        """Form teams."""
        self.selectors = list(selectors)
        members: dict[Hashable, list[int]] = {}
        for r, selector in enumerate(selectors):
            key = getattr(selector, "group_key", None)
            members.setdefault(None if key is None else (type(selector), key), []).append(r)
        self._teams: list[tuple[list[int], Team]] = []
        for key, places in members.items():
            some: Any = [selectors[r] for r in places]
            team = OneByOne(some) if key is None else type(some[0]).group(some)
            self._teams.append((places, team))

    def serves(self, selectors: Sequence[Selector]) -> bool:
        """True where the crew consists of exactly these selectors."""
        return len(selectors) == len(self.selectors) and all(
            a is b for a, b in zip(selectors, self.selectors, strict=True)
        )

    def select(self, views: Sequence[View | None], ks: Sequence[int]) -> list[Choice | None]:
        """Choose in every lane that sees someone."""
        choices: list[Choice | None] = [None] * len(self.selectors)
        for places, team in self._teams:
            answers = team.select([views[r] for r in places], [ks[r] for r in places])
            for r, answer in zip(places, answers, strict=True):
                choices[r] = answer
        return choices

    def feedback(self, outcomes: Sequence[Outcome | None]) -> list[Mapping[str, float]]:
        """Let every lane that played learn; returns what each logs."""
        metrics: list[Mapping[str, float]] = [{}] * len(self.selectors)
        for places, team in self._teams:
            for r, said in zip(places, team.feedback([outcomes[r] for r in places]), strict=True):
                metrics[r] = said
        return metrics
