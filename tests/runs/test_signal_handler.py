from __future__ import annotations

import os
import signal

import pytest

from fedglimpse.runs.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_interrupts(number: int) -> None:
    previous = signal.getsignal(number)
    requests: list[int] = []
    with stop_on_signals(lambda: requests.append(1)):
        os.kill(os.getpid(), number)
        assert requests == [1]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert requests == [1]
    assert signal.getsignal(number) is previous
