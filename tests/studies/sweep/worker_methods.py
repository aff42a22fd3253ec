"""A method whose process dies in the second round."""

from __future__ import annotations

import os
import signal

import fedglimpse


class Deadly(fedglimpse.Stateless):
    """Chooses as `fedavg` does, once."""

    def select(self, view: fedglimpse.View, k: int) -> fedglimpse.Choice:
        if view.round_num == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return fedglimpse.Choice(fedglimpse.random_slots(len(view.ids), k, view.rng))


def build(setting: fedglimpse.Setting) -> fedglimpse.Method:
    return fedglimpse.Method(Deadly(), setting.temporal_window())
