"""Rewards by what changed: the same optimal choices, without the level to be learnt first.

The reward is the score of the global model, which depends on all choices so far and hardly on the
last one. A Q of such rewards is mostly the level of the score, and what tells clients apart is lost
in the error about that level. Shaping by a potential changes no optimal policy (Ng, Harada and
Russell, 1999). With the value of a score that stays where it is as the potential,

    Phi^t = r^{t-1} / (1 - gamma),    r^t + gamma Phi^{t+1} - Phi^t = (r^t - r^{t-1}) / (1 - gamma),

so that Q says how much a choice lifts what is still to come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Shaping:
    """Turns the rewards of a run into their shaped changes, one after the other."""

    def __init__(self, gamma: float) -> None:
        """Begin before the first round, where the paper's Eq. (reward) has r = 0."""
        self.gamma = gamma
        self.last: Tensor = torch.zeros(1)  # [R] the reward before, one or one for each class

    def __call__(self, reward: Tensor) -> Tensor:
        """Return the shaped reward `[R]` of the round after the last one."""
        shaped = (reward - self.last) / (1 - self.gamma)
        self.last = reward.clone()
        return shaped

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue."""
        return {"last": self.last.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.last = state["last"].clone()
