"""FedAWE: clients continue from the model they last received, and echo updates they missed.

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
from fedglimpse.fields import setting as option
from fedglimpse.methods.base import MethodInfo, Setting, UniformRandom
from fedglimpse.types import Method, Update


@dataclass(frozen=True)
class Options:
    """`options.*` of FedAWE."""

    clip: float = option(0.5, "largest norm of the mean echoed update; 0: no limit", at_least=0)
    server_lr: float = option(1.0, "factor on the mean echoed update", above=0)
    everyone: bool = option(False, "all visible clients train, not selection.k of them")


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
        last_rounds = self.last[ids].tolist()
        received = [models[round_num].to(state) for round_num in last_rounds]
        return torch.stack(received)

    def step(self, state: Tensor, update: Update) -> Tensor:
        """Return the next global state `[d]`."""
        if not self.models:
            self.models = {-1: state.clone()}
        of_buffers = update.deltas[:, update.num_params :].mean(dim=0)
        of_parameters = self.options.server_lr * self._mean_echo(update)
        change = torch.cat([of_parameters, of_buffers])
        new_state = update.starts.mean(0) + change
        self.last[update.ids] = update.round_num
        self.models[update.round_num] = new_state.clone()
        self._drop_unused_models()
        return new_state

    def _mean_echo(self, update: Update) -> Tensor:
        """Return clip(mean a_i (y_i - x_i)) of the parameters."""
        parameters = update.deltas[:, : update.num_params]  # [K, n]
        rounds_away = update.round_num - self.last[update.ids]  # [K], at least 1
        total = rounds_away.to(parameters) @ parameters
        mean = total / len(rounds_away)
        if not self.options.clip:
            return mean
        norm = mean.norm().clamp(min=1e-30)
        factor = self.options.clip / norm
        return mean * factor.clamp(max=1)

    def _drop_unused_models(self) -> None:
        rounds_in_use = set(self.last.tolist())
        for round_num in list(self.models):
            if round_num not in rounds_in_use:
                del self.models[round_num]

    def state_dict(self) -> dict[str, Any]:
        """Return when each client took part, and the models they hold."""
        return {
            "last": self.last.clone(),
            "models": dict(self.models),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.last = state["last"].clone()
        self.models = dict(state["models"])


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
