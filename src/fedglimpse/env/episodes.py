"""Which seed the next episode has."""

from __future__ import annotations

from fedglimpse import rng

_LIMIT = 2**31  # seeds stay small enough for every library


class EpisodeSeeds:
    """Seeds of successive episodes: a function of the last explicit seed and of how many followed.

    Attributes:
        root: the last explicit seed.
        count: episodes since the one with that seed; -1 before the first episode.
    """

    def __init__(self, first: int) -> None:
        """Begin with the seed `first`, unless the first episode has an explicit one."""
        self.root = first
        self.count = -1

    def next(self, seed: int | None = None) -> int:
        """Return the seed of a new episode: `seed` where there is one, or the next in order."""
        if seed is None:
            self.count += 1
        else:
            self.root = seed
            self.count = 0
        if self.count == 0:
            return self.root
        return rng.key(self.root, "episode", self.count) % _LIMIT
