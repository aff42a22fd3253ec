"""What clients and server report: one function for each entry of `needs.CATALOGUE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse.data.population import Population
from fedglimpse.needs import CATALOGUE
from fedglimpse.sim.evaluate import Evaluator

Sketch = Callable[[Tensor], Tensor]  # [..., parameters] -> [..., D]


@dataclass(frozen=True)
class TrainedClients:
    """The trained clients of one lane."""

    states: Tensor  # [V, d]
    deltas: Tensor  # [V, d] states minus the global state
    loss: Tensor  # [V] mean training loss


class Reporter:
    """Computes what a client would compute on its own device, and what the server knows."""

    def __init__(self, sketch: Sketch, num_params: int, evaluator: Evaluator) -> None:
        """Reports are about parameters only, the first `num_params` floats of a state."""
        self.sketch, self.num_params, self.evaluator = sketch, num_params, evaluator

    def trained(self, names: frozenset[str], clients: TrainedClients) -> dict[str, Tensor]:
        """Reports that need local training: name -> `[V]` or `[V, D]`."""
        compute: Mapping[str, Callable[[], Tensor]] = {
            "sketch": lambda: self.sketch(clients.states[:, : self.num_params]),
            "delta_sketch": lambda: self.sketch(clients.deltas[:, : self.num_params]),
            "update_norm": lambda: clients.deltas[:, : self.num_params].norm(dim=1),
            "train_loss": lambda: clients.loss,
        }
        return _gather(names, "trained", compute)

    def probes(
        self, names: frozenset[str], state: Tensor, population: Population, ids: Tensor
    ) -> dict[str, Tensor]:
        """Reports computed at the global model, before training: name -> `[V]`."""
        compute = {"loss": lambda: self._losses(state, population, ids)}
        return _gather(names, "probe", compute)

    def server(self, names: frozenset[str], state: Tensor) -> dict[str, Tensor]:
        """Reports that cost the clients nothing: name -> `[D]`."""
        compute = {"global_sketch": lambda: self.sketch(state[: self.num_params])}
        return _gather(names - {"reward"}, "server", compute)

    def _losses(self, state: Tensor, population: Population, ids: Tensor) -> Tensor:
        data = population.dataset
        rows = [population.rows[int(i)].to(data.y_train.device) for i in ids]
        logits = self.evaluator.logits(state, data.x_train[torch.cat(rows)]).float()
        each = F.cross_entropy(logits, data.y_train[torch.cat(rows)], reduction="none")
        return torch.stack([part.mean() for part in each.split([len(r) for r in rows])])


def _gather(
    names: frozenset[str], phase: str, compute: Mapping[str, Callable[[], Tensor]]
) -> dict[str, Tensor]:
    wanted = sorted(n for n in names if CATALOGUE[n].phase == phase)
    return {n: compute[n]().detach().float().cpu() for n in wanted}
