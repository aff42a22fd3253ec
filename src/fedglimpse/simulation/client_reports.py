"""What clients and server report: one function for each entry of `reports.CATALOGUE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse.data.population import Population
from fedglimpse.federation.devices import apart
from fedglimpse.federation.reports import CATALOGUE
from fedglimpse.simulation.evaluation import Evaluator
from fedglimpse.simulation.gradients import distance, mean_gradients
from fedglimpse.simulation.trained_clients import TrainedClients, deltas_of, states_of

Sketch = Callable[[Tensor], Tensor]  # [..., parameters] -> [..., D]


@dataclass(frozen=True)
class Asked:
    """What one lane wants to know in this round."""

    names: frozenset[str]  # of `reports.CATALOGUE`, of any phase
    population: Population
    state: Tensor  # [d] the global model
    ids: Tensor  # [V] clients that report
    clients: TrainedClients | None = None  # the same clients, where they have trained

    @property
    def trained(self) -> TrainedClients:
        """The clients that have trained."""
        if self.clients is None:
            raise ValueError(f"clients {self.ids.tolist()} are asked for reports before training")
        return self.clients


Lanes = Sequence[Asked]


class Reporter:
    """Computes what a client would compute on its own device, and what the server knows.

    All lanes that ask for the same report get it from the same pass. Reports are float32 on the
    CPU: one row for each client, or one for the lane where only the server is asked.
    """

    def __init__(self, sketch: Sketch, num_params: int, evaluator: Evaluator) -> None:
        """Reports are about parameters only, the first `num_params` floats of a state."""
        self.sketch, self.num_params, self.evaluator = sketch, num_params, evaluator
        cut = num_params
        self._compute: Mapping[str, Callable[[Lanes], list[Tensor]]] = {
            # phase "probe": at the global model, before training
            "loss": self._losses,
            "gradient_distance": lambda some: self._distances(some, True),
            "gradient_distance_l2": lambda some: self._distances(some, False),
            "label_histogram": lambda some: [a.population.label_histogram(a.ids) for a in some],
            # phase "trained"
            "sketch": lambda some: _by_row(some, lambda rows: sketch(rows[:, :cut])),
            "delta_sketch": lambda some: _by_row(some, lambda rows: sketch(rows[:, :cut]), True),
            "update_norm": lambda some: _by_row(some, lambda rows: rows[:, :cut].norm(dim=1), True),
            "train_loss": lambda some: [a.trained.loss for a in some],
            "rms_loss": lambda some: [a.trained.squared_loss.sqrt() for a in some],
            "loss_after": self._losses_after,
            "delta_similarity": lambda some: [cosines(a.trained.deltas[:, :cut]) for a in some],
            "proxy_predictions": lambda some: [p.softmax(2) for p in self._proxy_logits(some)],
            "proxy_logits": self._proxy_logits,
            # phase "server": costs the clients nothing
            "global_sketch": lambda some: _by_lane(some, lambda rows: sketch(rows[..., :cut])),
            "proxy_histogram": self._proxy_histograms,
        }

    def report(self, phase: str, asked: Lanes) -> list[dict[str, Tensor]]:
        """Return the reports of one phase that each lane asks for: name -> tensor."""
        found: list[dict[str, Tensor]] = [{} for _ in asked]
        names = frozenset[str]().union(*(a.names for a in asked)) - {"reward"}
        for name in sorted(n for n in names if CATALOGUE[n].phase == phase):
            places = [i for i, a in enumerate(asked) if name in a.names]
            values = _to_cpu(self._compute[name]([asked[i] for i in places]))
            for i, value in zip(places, values, strict=True):
                found[i][name] = value.flatten(1) if value.dim() > 2 else value
        return found

    def probes(
        self, names: frozenset[str], state: Tensor, population: Population, ids: Tensor
    ) -> dict[str, Tensor]:
        """Return one lane's reports at the global model `[d]`, before training."""
        return self.report("probe", [Asked(names, population, state, ids)])[0]

    def trained(
        self, names: frozenset[str], clients: TrainedClients, population: Population
    ) -> dict[str, Tensor]:
        """Return one lane's reports of clients that have trained."""
        state = clients.states.new_zeros(0)  # no such report reads the global model
        return self.report("trained", [Asked(names, population, state, clients.ids, clients)])[0]

    def server(
        self, names: frozenset[str], state: Tensor, population: Population
    ) -> dict[str, Tensor]:
        """Return what one lane's server knows of its global model `[d]`."""
        return self.report("server", [Asked(names, population, state, torch.zeros(0).long())])[0]

    def _losses(self, some: Lanes) -> list[Tensor]:
        """Return the mean loss of each lane's state on its clients' examples `[V]`."""
        rows = [[a.population.rows[client] for client in a.ids.tolist()] for a in some]
        pairs = [
            _examples(a.population, torch.cat(own) if own else a.ids)
            for a, own in zip(some, rows, strict=True)
        ]
        each = self.evaluator.losses(_states(some), *_columns(pairs))
        return [_means(losses, own) for losses, own in zip(each, rows, strict=True)]

    def _losses_after(self, some: Lanes) -> list[Tensor]:
        """Return the mean loss of each client's own state on its examples `[V]`."""
        states = torch.cat([a.trained.states for a in some])
        losses = [each.mean() for each in self.evaluator.losses(states, *_of_clients(some))]
        joined = torch.stack(losses) if losses else states.new_zeros(0)
        return list(joined.split([len(a.ids) for a in some]))

    def _proxy_logits(self, some: Lanes) -> list[Tensor]:
        """Return what each trained client says of the proxy examples `[V, P, C]`."""
        if apart(some[0].state.device):
            return [self._said_of_proxies([a])[0] for a in some]
        alike: dict[int, list[int]] = {}
        for i, a in enumerate(some):
            alike.setdefault(len(a.population.proxy), []).append(i)
        found: dict[int, Tensor] = {}
        for places in alike.values():
            answers = self._said_of_proxies([some[i] for i in places])
            found |= dict(zip(places, answers, strict=True))
        return [found[i] for i in range(len(some))]

    def _said_of_proxies(self, some: Lanes) -> list[Tensor]:
        """Do so for lanes whose proxy sets are of one size, in one pass."""
        counts = [len(a.ids) for a in some]
        proxies = [proxy_examples(a.population)[0] for a in some]
        if not sum(counts):
            shape = (0, len(proxies[0]), self.evaluator.num_classes)
            return [some[0].state.new_zeros(shape) for _ in some]
        each = [x.expand(n, *x.shape) for x, n in zip(proxies, counts, strict=True)]
        x = each[0] if len(some) == 1 else torch.cat(each)
        states = states_of([a.trained for a in some])
        return list(self.evaluator.logits_of(states, x).float().split(counts))

    def _proxy_histograms(self, some: Lanes) -> list[Tensor]:
        """Return the shares of classes that each global model predicts `[C]`."""
        pairs = [proxy_examples(a.population) for a in some]
        return [
            scores.predicted
            for a, pair in zip(some, pairs, strict=True)
            for scores in [self.evaluator.score(a.state, *pair)]
        ]

    def _distances(self, some: Lanes, per_tensor: bool) -> list[Tensor]:
        """Return how far each client's full gradient is from the proxy gradient `[V]`."""
        pairs = [proxy_examples(a.population) for a in some]
        proxies = mean_gradients(self.evaluator, _states(some), *_columns(pairs))
        states = torch.cat([a.state.expand(len(a.ids), -1) for a in some])
        own = mean_gradients(self.evaluator, states, *_of_clients(some))
        layout, parts = self.evaluator.layout, own.split([len(a.ids) for a in some])
        return [
            distance(layout, part, proxy, per_tensor)
            for part, proxy in zip(parts, proxies, strict=True)
        ]


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


def _of_clients(some: Lanes) -> tuple[list[Tensor], list[Tensor]]:
    """Return the raw examples and labels of every client of all lanes, gathered in one go."""
    rows = [a.population.rows[i] for a in some for i in a.ids.tolist()]
    x, y = _examples(some[0].population, torch.cat(rows) if rows else some[0].ids)
    counts = [len(own) for own in rows]
    return list(x.split(counts)), list(y.split(counts))


def _states(some: Lanes) -> Tensor:
    return torch.stack([a.state for a in some])  # [R, d]


def _columns(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _means(losses: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """Average the losses of several clients' examples, one after the other, by client `[V]`."""
    parts = losses.split([len(r) for r in rows])
    return torch.stack([part.mean() for part in parts]) if rows else losses.new_zeros(0)


def _by_row(some: Lanes, compute: Callable[[Tensor], Tensor], deltas: bool = False) -> list[Tensor]:
    """Compute something of every client's state, or its delta; on a GPU, all lanes at once."""
    clients = [a.trained for a in some]
    if apart(clients[0].states.device):
        return [compute(c.deltas if deltas else c.states) for c in clients]
    rows = deltas_of(clients) if deltas else states_of(clients)
    return list(compute(rows).split([a.ids.shape[0] for a in some]))


def _by_lane(some: Lanes, compute: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Compute something of every global state; on a GPU, of all lanes at once."""
    if apart(some[0].state.device):
        return [compute(a.state) for a in some]
    return list(compute(_states(some)))


def _to_cpu(values: Sequence[Tensor]) -> list[Tensor]:
    """Bring tensors home as float32, in one transfer."""
    alike = len({value.shape[1:] for value in values}) == 1
    rows = values if alike else [value.reshape(-1) for value in values]
    whole = torch.cat(list(rows)).detach().float().cpu()
    parts = whole.split([row.shape[0] for row in rows])
    if alike:
        return list(parts)
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]
