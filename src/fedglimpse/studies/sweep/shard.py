"""A shard: one of several parts of a sweep, each run by a command of its own, anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedglimpse.errors import UserError
from fedglimpse.studies.sweep.plan import Cell


@dataclass(frozen=True)
class Shard:
    """One of several parts of a sweep, which other commands run."""

    number: int = 1  # 1 .. count
    count: int = 1

    @property
    def lock(self) -> str:
        """What the process that runs this shard locks."""
        return "sweep" if self.count == 1 else f"sweep shard {self.number} of {self.count}"

    def packs(self, packs: Sequence[list[Cell]]) -> list[list[Cell]]:
        """Return those of a sweep's packs that belong to this shard."""
        return list(packs[self.number - 1 :: self.count])


WHOLE = Shard()


def read_shard(text: str) -> Shard:
    """Return the shard that `--shard I/N` names."""
    number, slash, count = text.partition("/")
    words = (number, count)
    if slash and all(word.isascii() and word.isdigit() for word in words):
        shard = Shard(int(number), int(count))
        if 1 <= shard.number <= shard.count:
            return shard
    raise UserError(
        f"--shard {text} must be I/N with I from 1 to N, such as --shard 1/4.", key="--shard"
    )
