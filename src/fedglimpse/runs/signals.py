"""Ctrl-C and termination signals, for every command that can finish its current round first."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def stop_on_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call `request_stop` at the first Ctrl-C or termination signal.

    A second signal raises KeyboardInterrupt. The previous handlers return afterwards.
    """
    requested = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        request_stop()

    previous: dict[int, Any] = {}
    for stopping in (signal.SIGINT, signal.SIGTERM):
        previous[stopping] = signal.signal(stopping, handle)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
