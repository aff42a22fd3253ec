"""When a sweep stops: its budget is nearly spent, or a signal asked it to."""

from __future__ import annotations

import time
from collections.abc import Callable

from fedglimpse.errors import UserError

RESERVE = 1.0  # seconds kept for what cannot be measured beforehand


class Stop:
    """Says after every round whether to continue.

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
        if budget is not None and not budget > RESERVE:  # also refuses nan
            raise UserError(
                f"--budget {budget:g} leaves no time for a single round: give a number of seconds "
                f"above {RESERVE:g}.",
                key="--budget",
            )
        self.asked = False  # by a signal
        self._clock = clock
        self._deadline = None if budget is None else clock() + budget
        self._pack_began = clock()
        self._last_round: float | None = None  # when the last round of this pack ended
        self._longest_round = 0.0
        self._longest_start = 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds left of the budget; None without one."""
        return None if self._deadline is None else self._deadline - self._clock()

    def request(self) -> None:
        """Stop after the current round."""
        self.asked = True

    def may_begin(self) -> bool:
        """Return whether another pack can begin; it counts as begun now."""
        self._pack_began = self._clock()
        self._last_round = None
        return not self.asked and not self._has_less_than(self._longest_start + RESERVE)

    def after_round(self) -> bool:
        """Return whether the round that has just ended must be the last."""
        round_end = self._clock()
        if self._last_round is None:
            self._longest_start = max(self._longest_start, round_end - self._pack_began)
        else:
            self._longest_round = max(self._longest_round, round_end - self._last_round)
        self._last_round = round_end
        return self.asked or self._has_less_than(2 * self._longest_round + RESERVE)

    def _has_less_than(self, seconds: float) -> bool:
        return self.seconds_left is not None and self.seconds_left < seconds
