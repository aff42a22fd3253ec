"""Which seed the next episode has."""

from __future__ import annotations

from fedglimpse import rng

_LIMIT = 2**31  # seeds stay small enough for every library


class Episodes:
    """Seeds of successive episodes: a function of the last seed given and of how many followed."""

    def __init__(self, first: int) -> None:
        """Begin with the seed `first`, unless the first episode is given one."""
        self.root, self.count = first, -1

    def begin(self, seed: int | None = None) -> int:
        """Return the seed of a new episode: `seed`, or the next one."""
        if seed is not None:
            self.root, self.count = seed, 0
        else:
            self.count += 1
        return rng.key(self.root, "episode", self.count) % _LIMIT if self.count else self.root
