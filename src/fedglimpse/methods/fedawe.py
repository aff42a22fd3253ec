"""FedAWE: clients go on from the model they last received, and echo updates they missed.

Xiang, Ioannidis, Yeh, Joe-Wong and Su, "Efficient Federated Learning against Heterogeneous and
Non-stationary Client Unavailability", 2024, and the code at github.com/mingxiang12/FedAWE. Client i
trains x_i -> y_i; with a_i rounds since it last took part,

    W^{t+1} = mean x_i + server_lr * clip(mean a_i (y_i - x_i)),

and only the clients that took part receive it. In this package a simulator keeps the x_i.

Deviations: 1. K random visible clients train, the rest count as absent (code: all available ones,
`options.everyone`). 2. Buffers (BatchNorm's statistics) are the mean of y_i, without the echo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedglimpse.federation.aggregation import WeightedDelta
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom, require
from fedglimpse.types import Method, Update


@dataclass(frozen=True)
class Options:
    """`options.*` of FedAWE."""

    clip: float = 0.5  # largest norm of the mean echoed update; 0: no limit
    server_lr: float = 1.0
    everyone: bool = False  # all visible clients train, not selection.k of them

    def __post_init__(self) -> None:
        require(self.clip >= 0, "clip", self.clip, "0 for no limit, or a norm such as 0.5")
        require(self.server_lr > 0, "server_lr", self.server_lr, "a number above 0, such as 1.0")


class Echo(WeightedDelta):
    """Averages the clients' own models and their updates times the rounds they were away."""

    def __init__(self, num_clients: int, options: Options) -> None:
        """Start with all clients at the initial model, as if they had taken part in round -1."""
        self.options = options
        self.last = torch.full((num_clients,), -1)  # [N] round of the last participation
        self.models: dict[int, Tensor] = {}  # round -> the model its participants received

    def starts(self, state: Tensor, ids: Tensor) -> Tensor:
        """Every client trains from the model it last received `[K, d]`."""
        models = self.models or {-1: state}
        return torch.stack([models[t].to(state) for t in self.last[ids].tolist()])

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        self.models = self.models or {-1: state.clone()}
        away = (update.round_num - self.last[update.ids]).to(state)  # [K], at least 1
        cut, options = update.num_params, self.options
        move = away @ update.deltas[:, :cut] / len(away)
        if options.clip:
            move = move * (options.clip / move.norm().clamp(min=1e-30)).clamp(max=1)
        change = torch.cat([options.server_lr * move, update.deltas[:, cut:].mean(0)])
        new = update.starts.mean(0) + change
        self.last[update.ids] = update.round_num
        self.models[update.round_num] = new.clone()
        held = set(self.last.tolist())
        self.models = {t: model for t, model in self.models.items() if t in held}
        return new

    def state_dict(self) -> dict[str, Any]:
        """When each client took part, and the models they hold."""
        return {"last": self.last.clone(), "models": dict(self.models)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.last, self.models = state["last"].clone(), dict(state["models"])


def build(setting: Setting) -> Method:
    """Return FedAWE."""
    options = setting.options(Options)
    echo = Echo(setting.num_clients, options)
    return Method(UniformRandom("uniform"), echo, takes_all=options.everyone)


INFO = MethodInfo(
    name="fedawe",
    summary="returning clients count once for every round they missed",
    source="Xiang et al. 2024",
    build=build,
)
