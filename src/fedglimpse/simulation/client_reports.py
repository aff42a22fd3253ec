"""What clients and server report: one function for each entry of `reports.CATALOGUE`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse.data.population import Population
from fedglimpse.federation.devices import keeps_lanes_separate
from fedglimpse.federation.reports import CATALOGUE
from fedglimpse.simulation.evaluation import Evaluator, gradient_distance
from fedglimpse.simulation.trained_clients import TrainedClients, deltas_of, states_of

Sketch = Callable[[Tensor], Tensor]  # [..., parameters] -> [..., D]


# On a CPU these are computed for each lane by itself, so that its bits do not depend on the others.
ALONE_ON_CPU = frozenset(
    {"sketch", "delta_sketch", "update_norm", "proxy_logits", "proxy_predictions", "global_sketch"}
)


@dataclass(frozen=True)
class ReportRequest:
    """The reports that one lane asks for in this round."""

    names: frozenset[str]  # of `reports.CATALOGUE`, of any phase
    population: Population
    state: Tensor  # [d] the global model
    ids: Tensor  # [V] clients that report
    clients: TrainedClients | None = None  # the same clients, where they have trained

    @property
    def trained(self) -> TrainedClients:
        """The clients, which have trained."""
        if self.clients is None:
            raise ValueError(f"clients {self.ids.tolist()} are asked for reports before training")
        return self.clients

    @property
    def rows(self) -> list[Tensor]:
        """Rows of the dataset that each client holds."""
        return [self.population.rows[client] for client in self.ids.tolist()]


Requests = Sequence[ReportRequest]  # one for each lane


class Reporter:
    """Computes what a client would compute on its own device, and what the server knows.

    All lanes that ask for the same report get it from the same pass. Reports are float32 on the
    CPU: one row for each client, or one for the lane where only the server is asked.
    """

    def __init__(self, sketch: Sketch, num_params: int, evaluator: Evaluator) -> None:
        """Reports are about parameters only, the first `num_params` floats of a state."""
        self.sketch = sketch
        self.num_params = num_params
        self.evaluator = evaluator
        self._of_lane: Mapping[str, Callable[[ReportRequest], Tensor]] = {
            "label_histogram": lambda lane: lane.population.label_histogram(lane.ids),
            "train_loss": lambda lane: lane.trained.loss,
            "rms_loss": lambda lane: lane.trained.squared_loss.sqrt(),
            "delta_similarity": self._delta_similarity,
            "proxy_histogram": self._proxy_histogram,
        }
        self._of_lanes: Mapping[str, Callable[[Requests], Sequence[Tensor]]] = {
            "loss": self._loss,
            "gradient_distance": lambda lanes: self._distances(lanes, per_tensor=True),
            "gradient_distance_l2": lambda lanes: self._distances(lanes, per_tensor=False),
            "sketch": lambda lanes: _split(lanes, self._sketched(_states(lanes))),
            "delta_sketch": lambda lanes: _split(lanes, self._sketched(_deltas(lanes))),
            "update_norm": lambda lanes: _split(lanes, self._norms(_deltas(lanes))),
            "loss_after": self._loss_after,
            "proxy_predictions": self._proxy_predictions,
            "proxy_logits": self._proxy_logits,
            "global_sketch": lambda lanes: self._sketched(_global_states(lanes)).unbind(),
        }

    def report(self, phase: str, requests: Requests) -> list[dict[str, Tensor]]:
        """Return the reports of one phase that each lane asks for: name -> tensor."""
        reports: list[dict[str, Tensor]] = [{} for _ in requests]
        names: set[str] = set()
        for request in requests:
            names |= request.names
        names.discard("reward")  # the server knows it after the round
        for name in sorted(names):
            if CATALOGUE[name].phase != phase:
                continue
            lanes = [i for i, request in enumerate(requests) if name in request.names]
            values = _to_cpu(self._values(name, [requests[i] for i in lanes]))
            for i, value in zip(lanes, values, strict=True):
                reports[i][name] = value.flatten(1) if value.dim() > 2 else value
        return reports

    def _values(self, name: str, requests: Requests) -> Sequence[Tensor]:
        """Compute one report for several lanes."""
        if name in self._of_lane:
            return list(map(self._of_lane[name], requests))
        compute = self._of_lanes[name]
        if name in ALONE_ON_CPU and keeps_lanes_separate(requests[0].state.device):
            return [compute([request])[0] for request in requests]
        return compute(requests)

    def probes(
        self, names: frozenset[str], state: Tensor, population: Population, ids: Tensor
    ) -> dict[str, Tensor]:
        """Return one lane's reports at the global model `[d]`, before training."""
        return self.report("probe", [ReportRequest(names, population, state, ids)])[0]

    def trained(
        self, names: frozenset[str], clients: TrainedClients, population: Population
    ) -> dict[str, Tensor]:
        """Return one lane's reports of clients that have trained."""
        state = clients.states.new_zeros(0)  # no such report reads the global model
        request = ReportRequest(names, population, state, clients.ids, clients)
        return self.report("trained", [request])[0]

    def server(
        self, names: frozenset[str], state: Tensor, population: Population
    ) -> dict[str, Tensor]:
        """Return what one lane's server knows of its global model `[d]`."""
        nobody = torch.zeros(0, dtype=torch.long)
        return self.report("server", [ReportRequest(names, population, state, nobody)])[0]

    # ---- At the global model, before training.

    def _loss(self, requests: Requests) -> list[Tensor]:
        """Mean loss of each lane's global model on its clients' examples `[V]`."""
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        counts: list[list[int]] = []  # examples of each client, lane by lane
        for request in requests:
            rows = request.rows
            x, y = _examples(request.population, _joined(rows))
            xs.append(x)
            ys.append(y)
            counts.append(_lengths(rows))
        lane_losses = self.evaluator.losses(_global_states(requests), xs, ys)
        means = []
        for losses, lane_counts in zip(lane_losses, counts, strict=True):
            means.append(_means(losses.split(lane_counts), like=losses))
        return means

    def _distances(self, requests: Requests, per_tensor: bool) -> list[Tensor]:
        """Distance of each client's full gradient from the proxy gradient `[V]`."""
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        states: list[Tensor] = []
        for request in requests:
            x, y = proxy_examples(request.population)
            xs.append(x)
            ys.append(y)
            states.append(request.state.expand(len(request.ids), -1))
        proxy_gradients = self.evaluator.mean_gradients(_global_states(requests), xs, ys)
        examples = _examples_of_each_client(requests)
        gradients = self.evaluator.mean_gradients(torch.cat(states), *examples)
        distances = []
        for clients, proxy in zip(_split(requests, gradients), proxy_gradients, strict=True):
            layout = self.evaluator.layout
            distances.append(gradient_distance(layout, clients, proxy, per_tensor))
        return distances

    # ---- After training.

    def _sketched(self, rows: Tensor) -> Tensor:
        return self.sketch(rows[..., : self.num_params])

    def _norms(self, rows: Tensor) -> Tensor:
        return rows[:, : self.num_params].norm(dim=1)

    def _loss_after(self, requests: Requests) -> Sequence[Tensor]:
        """Mean loss of each client's trained model on its examples `[V]`."""
        states = torch.cat([request.trained.states for request in requests])
        losses = self.evaluator.losses(states, *_examples_of_each_client(requests))
        return _split(requests, _means(losses, like=states))

    def _delta_similarity(self, request: ReportRequest) -> Tensor:
        return cosines(request.trained.deltas[:, : self.num_params])

    def _proxy_predictions(self, requests: Requests) -> list[Tensor]:
        return [logits.softmax(2) for logits in self._proxy_logits(requests)]

    def _proxy_logits(self, requests: Requests) -> list[Tensor]:
        """Logits of each trained client on the proxy examples `[V, P, C]`.

        Lanes whose proxy sets are of one size share a pass.
        """
        by_size: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            by_size.setdefault(len(request.population.proxy), []).append(i)
        logits: dict[int, Tensor] = {}
        for lanes in by_size.values():
            lane_logits = self._logits_in_one_pass([requests[i] for i in lanes])
            logits |= zip(lanes, lane_logits, strict=True)
        return [logits[i] for i in range(len(requests))]

    def _logits_in_one_pass(self, requests: Requests) -> Sequence[Tensor]:
        copies: list[Tensor] = []  # of each lane's proxy inputs, one for each client
        for request in requests:
            x, _ = proxy_examples(request.population)
            copies.append(x.expand(len(request.ids), *x.shape))
        x = copies[0] if len(copies) == 1 else torch.cat(copies)  # [J, P, *shape]
        states = _states(requests)
        if not len(states):
            logits = states.new_zeros(0, x.shape[1], self.evaluator.num_classes)
        else:
            logits = self.evaluator.logits_of(states, x).float()
        return _split(requests, logits)

    # ---- Known to the server.

    def _proxy_histogram(self, request: ReportRequest) -> Tensor:
        """Shares of classes that the global model predicts on the proxy set `[C]`."""
        x, y = proxy_examples(request.population)
        return self.evaluator.score(request.state, x, y).predicted


def cosines(rows: Tensor) -> Tensor:
    """Return the cosines between all rows `[V, V]`; 0 where a row is zero."""
    norms = rows.norm(dim=1, keepdim=True)
    unit = torch.where(norms > 0, rows / norms.clamp(min=1e-30), 0.0)
    return unit @ unit.T


def proxy_examples(population: Population) -> tuple[Tensor, Tensor]:
    """Return the server's proxy examples and labels."""
    return _examples(population, population.proxy)


def _examples(population: Population, rows: Tensor) -> tuple[Tensor, Tensor]:
    dataset = population.dataset
    rows = rows.to(dataset.y_train.device)
    return dataset.x_train[rows], dataset.y_train[rows]


def _examples_of_each_client(requests: Requests) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the examples and labels of every client of all lanes, gathered in one pass."""
    rows: list[Tensor] = []
    for request in requests:
        rows += request.rows
    x, y = _examples(requests[0].population, _joined(rows))
    return x.split(_lengths(rows)), y.split(_lengths(rows))


def _joined(rows: Sequence[Tensor]) -> Tensor:
    """Return row numbers one after the other; there may be none."""
    return torch.cat(list(rows)) if rows else torch.zeros(0, dtype=torch.long)


def _lengths(tensors: Iterable[Tensor]) -> list[int]:
    return [len(tensor) for tensor in tensors]


def _means(losses: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the mean of each client's losses `[V]`, of the type of `like`; there may be none."""
    return torch.stack([loss.mean() for loss in losses]) if losses else like.new_zeros(0)


def _global_states(requests: Requests) -> Tensor:
    return torch.stack([request.state for request in requests])  # [R, d]


def _states(requests: Requests) -> Tensor:
    return states_of([request.trained for request in requests])  # [J, d]


def _deltas(requests: Requests) -> Tensor:
    return deltas_of([request.trained for request in requests])  # [J, d]


def _split(requests: Requests, rows: Tensor) -> Sequence[Tensor]:
    """Return the rows `[J, ...]` of all clients lane by lane."""
    return rows.split([request.ids.shape[0] for request in requests])


def _to_cpu(values: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU as float32, in one transfer."""
    same_shape = len({value.shape[1:] for value in values}) == 1
    rows = values if same_shape else [value.reshape(-1) for value in values]
    copied = torch.cat(list(rows)).detach().float().cpu().split(_lengths(rows))
    if same_shape:
        return list(copied)
    return [row.view(value.shape) for row, value in zip(copied, values, strict=True)]
