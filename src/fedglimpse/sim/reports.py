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
from fedglimpse.sim.gradients import distance, mean_gradient

Sketch = Callable[[Tensor], Tensor]  # [..., parameters] -> [..., D]


@dataclass(frozen=True)
class TrainedClients:
    """Clients of one lane that have trained in this round."""

    ids: Tensor  # [V] on the CPU
    starts: Tensor  # [V, d] what they trained from
    states: Tensor  # [V, d] what came of it
    loss: Tensor  # [V] mean training loss
    squared_loss: Tensor  # [V] mean squared training loss of an example

    @property
    def deltas(self) -> Tensor:
        """Trained states minus starts `[V, d]`."""
        return self.states - self.starts

    def pick(self, slots: Tensor) -> TrainedClients:
        """Return the clients at these positions, in this order."""
        return TrainedClients(*(v[slots.to(v.device)] for v in vars(self).values()))


class Reporter:
    """Computes what a client would compute on its own device, and what the server knows.

    All reports are float32 on the CPU.
    """

    def __init__(self, sketch: Sketch, num_params: int, evaluator: Evaluator) -> None:
        """Reports are about parameters only, the first `num_params` floats of a state."""
        self.sketch, self.num_params, self.evaluator = sketch, num_params, evaluator

    def trained(
        self, names: frozenset[str], clients: TrainedClients, population: Population
    ) -> dict[str, Tensor]:
        """Reports that need local training: name -> `[V]` or `[V, D]`."""
        cut = self.num_params
        compute: Mapping[str, Callable[[], Tensor]] = {
            "sketch": lambda: self.sketch(clients.states[:, :cut]),
            "delta_sketch": lambda: self.sketch(clients.deltas[:, :cut]),
            "update_norm": lambda: clients.deltas[:, :cut].norm(dim=1),
            "train_loss": lambda: clients.loss,
            "rms_loss": lambda: clients.squared_loss.sqrt(),
            "loss_after": lambda: self._losses_after(clients, population),
            "delta_similarity": lambda: cosines(clients.deltas[:, :cut]),
            "proxy_predictions": lambda: self._proxy_logits(clients, population).softmax(2),
            "proxy_logits": lambda: self._proxy_logits(clients, population),
        }
        return _gather(names, "trained", compute)

    def probes(
        self, names: frozenset[str], state: Tensor, population: Population, ids: Tensor
    ) -> dict[str, Tensor]:
        """Reports computed at the global model, before training: name -> `[V]` or `[V, C]`."""
        compute: Mapping[str, Callable[[], Tensor]] = {
            "loss": lambda: self._losses(state, population, ids),
            "gradient_distance": lambda: self._distances(state, population, ids, True),
            "gradient_distance_l2": lambda: self._distances(state, population, ids, False),
            "label_histogram": lambda: population.label_histogram(ids),
        }
        return _gather(names, "probe", compute)

    def server(
        self, names: frozenset[str], state: Tensor, population: Population
    ) -> dict[str, Tensor]:
        """Reports that cost the clients nothing: name -> `[D]` or `[C]`."""
        compute: Mapping[str, Callable[[], Tensor]] = {
            "global_sketch": lambda: self.sketch(state[: self.num_params]),
            "proxy_histogram": lambda: (
                self.evaluator.score(state, *proxy_examples(population)).predicted
            ),
        }
        return _gather(names - {"reward"}, "server", compute)

    def _losses(self, state: Tensor, population: Population, ids: Tensor) -> Tensor:
        """Return the mean loss of one state on each client's examples `[V]`, in one pass."""
        if not len(ids):
            return state.new_zeros(0)
        rows = [population.rows[client] for client in ids.tolist()]
        x, y = _examples(population, torch.cat(rows))
        each = F.cross_entropy(self.evaluator.logits(state, x).float(), y, reduction="none")
        return torch.stack([part.mean() for part in each.split([len(r) for r in rows])])

    def _losses_after(self, clients: TrainedClients, population: Population) -> Tensor:
        """Return the mean loss of each client's own state on its examples `[V]`."""
        losses = torch.zeros(len(clients.ids))
        for j, state in enumerate(clients.states):
            losses[j] = self._losses(state, population, clients.ids[j : j + 1])[0]
        return losses

    def _proxy_logits(self, clients: TrainedClients, population: Population) -> Tensor:
        """Return what each trained client says of the proxy examples `[V, P, C]`."""
        x, y = proxy_examples(population)
        logits = [self.evaluator.logits(state, x).float() for state in clients.states]
        empty = clients.states.new_zeros(0, len(y), self.evaluator.num_classes)
        return torch.stack(logits) if logits else empty

    def _distances(
        self, state: Tensor, population: Population, ids: Tensor, per_tensor: bool
    ) -> Tensor:
        """Return how far each client's full gradient is from the proxy gradient `[V]`."""
        proxy = mean_gradient(self.evaluator, state, *proxy_examples(population))
        distances = []
        for client in ids.tolist():
            own = mean_gradient(self.evaluator, state, *client_examples(population, client))
            distances.append(distance(self.evaluator.layout, own, proxy, per_tensor))
        return torch.stack(distances) if distances else state.new_zeros(0)


def client_examples(population: Population, client: int) -> tuple[Tensor, Tensor]:
    """Return the raw examples and labels of one client."""
    return _examples(population, population.rows[client])


def proxy_examples(population: Population) -> tuple[Tensor, Tensor]:
    """Return the server's proxy examples and labels."""
    return _examples(population, population.proxy)


def cosines(rows: Tensor) -> Tensor:
    """Return the cosines between all rows `[V, V]`; 0 where a row is zero."""
    norms = rows.norm(dim=1, keepdim=True)
    unit = torch.where(norms > 0, rows / norms.clamp(min=1e-30), 0.0)
    return unit @ unit.T


def _examples(population: Population, rows: Tensor) -> tuple[Tensor, Tensor]:
    data = population.dataset
    rows = rows.to(data.y_train.device)
    return data.x_train[rows], data.y_train[rows]


def _gather(
    names: frozenset[str], phase: str, compute: Mapping[str, Callable[[], Tensor]]
) -> dict[str, Tensor]:
    wanted = sorted(n for n in names if CATALOGUE[n].phase == phase)
    found = {n: compute[n]().detach().float().cpu() for n in wanted}
    return {n: v.flatten(1) if v.dim() > 2 else v for n, v in found.items()}
