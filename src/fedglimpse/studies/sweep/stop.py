"""When a sweep stops: its budget is nearly spent, or someone asked it to."""

from __future__ import annotations

import time
from collections.abc import Callable

from fedglimpse.errors import UserError

RESERVE = 1.0  # seconds kept for what cannot be measured beforehand


class Stop:
    """Says after every round whether to go on.

    It keeps back twice the longest time between two rounds (one more round, and the checkpoints of
    all lanes), and begins no pack that would not get to its first round.
    """

    def __init__(
        self, budget: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the clock.

        Args:
            budget: seconds; None: no limit.
            clock: for tests.
        """
        if budget is not None and not budget > RESERVE:  # nan is not
            raise UserError(
                f"--budget {budget:g} leaves no time for a single round: give a number of seconds "
                f"above {RESERVE:g}."
            )
        self._clock, self._end = clock, None if budget is None else clock() + budget
        self.asked = False  # by a signal
        self._last: float | None = None  # when the last round of this pack ended
        self._begun = clock()
        self._longest_round = self._longest_start = 0.0

    @property
    def left(self) -> float | None:
        """Seconds left of the budget; None without one."""
        return None if self._end is None else self._end - self._clock()

    def request(self) -> None:
        """Stop after the current round."""
        self.asked = True

    def may_begin(self) -> bool:
        """True where another pack can be begun; it is taken as begun now."""
        self._begun, self._last = self._clock(), None
        return not self.asked and (self.left is None or self.left > self._longest_start + RESERVE)

    def after_round(self) -> bool:
        """True where the round that has just ended must be the last."""
        now = self._clock()
        if self._last is None:
            self._longest_start = max(self._longest_start, now - self._begun)
        else:
            self._longest_round = max(self._longest_round, now - self._last)
        self._last = now
        kept = 2 * self._longest_round + RESERVE
        return self.asked or (self.left is not None and self.left < kept)
