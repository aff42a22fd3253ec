"""What clients and server report: one function for each entry of `reports.CATALOGUE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedglimpse.data.population import Population
from fedglimpse.federation.devices import keeps_lanes_separate
from fedglimpse.federation.reports import CATALOGUE
from fedglimpse.simulation.evaluation import Evaluator, gradient_distance
from fedglimpse.simulation.trained_clients import TrainedClients, deltas_of, states_of

Sketch = Callable[[Tensor], Tensor]  # [..., parameters] -> [..., D]


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
        self._compute: Mapping[str, Callable[[Requests], list[Tensor]]] = {
            "loss": self._loss,
            "gradient_distance": self._gradient_distance,
            "gradient_distance_l2": self._gradient_distance_l2,
            "label_histogram": _label_histogram,
            "sketch": self._sketch,
            "delta_sketch": self._delta_sketch,
            "update_norm": self._update_norm,
            "train_loss": _train_loss,
            "rms_loss": _rms_loss,
            "loss_after": self._loss_after,
            "delta_similarity": self._delta_similarity,
            "proxy_predictions": self._proxy_predictions,
            "proxy_logits": self._proxy_logits,
            "global_sketch": self._global_sketch,
            "proxy_histogram": self._proxy_histogram,
        }

    def report(self, phase: str, requests: Requests) -> list[dict[str, Tensor]]:
        """Return the reports of one phase that each lane asks for: name -> tensor."""
        reports: list[dict[str, Tensor]] = [{} for _ in requests]
        names = set().union(*(request.names for request in requests))
        names.discard("reward")  # known to the server after the round
        for name in sorted(names):
            if CATALOGUE[name].phase != phase:
                continue
            lanes = [i for i, request in enumerate(requests) if name in request.names]
            values = _to_cpu(self._compute[name]([requests[i] for i in lanes]))
            for i, value in zip(lanes, values, strict=True):
                reports[i][name] = value.flatten(1) if value.dim() > 2 else value
        return reports

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
        xs = []
        ys = []
        counts = []  # examples of each client, by lane
        for request in requests:
            x, y, lane_counts = _client_examples(request)
            xs.append(x)
            ys.append(y)
            counts.append(lane_counts)
        losses = self.evaluator.losses(_global_states(requests), xs, ys)
        means = []
        for lane_losses, lane_counts in zip(losses, counts, strict=True):
            client_losses = lane_losses.split(lane_counts)
            means.append(_stack([loss.mean() for loss in client_losses], lane_losses))
        return means

    def _gradient_distance(self, requests: Requests) -> list[Tensor]:
        return self._distances(requests, per_tensor=True)

    def _gradient_distance_l2(self, requests: Requests) -> list[Tensor]:
        return self._distances(requests, per_tensor=False)

    def _distances(self, requests: Requests, per_tensor: bool) -> list[Tensor]:
        """Distance of each client's full gradient from the proxy gradient `[V]`."""
        xs = []
        ys = []
        for request in requests:
            x, y = proxy_examples(request.population)
            xs.append(x)
            ys.append(y)
        proxy_gradients = self.evaluator.mean_gradients(_global_states(requests), xs, ys)
        states = [request.state.expand(len(request.ids), -1) for request in requests]
        gradients = self.evaluator.mean_gradients(
            torch.cat(states), *_examples_of_each_client(requests)
        )
        distances = []
        lane_gradients = gradients.split([len(request.ids) for request in requests])
        for clients, proxy in zip(lane_gradients, proxy_gradients, strict=True):
            layout = self.evaluator.layout
            distances.append(gradient_distance(layout, clients, proxy, per_tensor))
        return distances

    # ---- After training.

    def _sketch(self, requests: Requests) -> list[Tensor]:
        return _per_client(requests, states_of, self._sketched)

    def _delta_sketch(self, requests: Requests) -> list[Tensor]:
        return _per_client(requests, deltas_of, self._sketched)

    def _sketched(self, rows: Tensor) -> Tensor:
        return self.sketch(rows[..., : self.num_params])

    def _update_norm(self, requests: Requests) -> list[Tensor]:
        return _per_client(requests, deltas_of, lambda rows: rows[:, : self.num_params].norm(dim=1))

    def _loss_after(self, requests: Requests) -> list[Tensor]:
        """Mean loss of each client's trained model on its examples `[V]`."""
        states = torch.cat([request.trained.states for request in requests])
        losses = self.evaluator.losses(states, *_examples_of_each_client(requests))
        means = _stack([loss.mean() for loss in losses], states)
        return list(means.split([len(request.ids) for request in requests]))

    def _delta_similarity(self, requests: Requests) -> list[Tensor]:
        return [cosines(request.trained.deltas[:, : self.num_params]) for request in requests]

    def _proxy_predictions(self, requests: Requests) -> list[Tensor]:
        return [logits.softmax(2) for logits in self._proxy_logits(requests)]

    def _proxy_logits(self, requests: Requests) -> list[Tensor]:
        """Logits of each trained client on the proxy examples `[V, P, C]`.

        On a GPU, lanes whose proxy sets are of one size share a pass.
        """
        if keeps_lanes_separate(requests[0].state.device):
            return [self._logits_in_one_pass([request])[0] for request in requests]
        by_size: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            by_size.setdefault(len(request.population.proxy), []).append(i)
        logits: dict[int, Tensor] = {}
        for lanes in by_size.values():
            lane_logits = self._logits_in_one_pass([requests[i] for i in lanes])
            logits |= zip(lanes, lane_logits, strict=True)
        return [logits[i] for i in range(len(requests))]

    def _logits_in_one_pass(self, requests: Requests) -> list[Tensor]:
        counts = [len(request.ids) for request in requests]
        proxies = [proxy_examples(request.population)[0] for request in requests]
        if not sum(counts):
            empty = requests[0].state.new_zeros(0, len(proxies[0]), self.evaluator.num_classes)
            return [empty for _ in requests]
        copies = [x.expand(n, *x.shape) for x, n in zip(proxies, counts, strict=True)]
        x = copies[0] if len(requests) == 1 else torch.cat(copies)
        states = states_of([request.trained for request in requests])
        return list(self.evaluator.logits_of(states, x).float().split(counts))

    # ---- Known to the server.

    def _global_sketch(self, requests: Requests) -> list[Tensor]:
        if keeps_lanes_separate(requests[0].state.device):
            return [self._sketched(request.state) for request in requests]
        return list(self._sketched(_global_states(requests)))

    def _proxy_histogram(self, requests: Requests) -> list[Tensor]:
        """Shares of classes that each global model predicts on the proxy set `[C]`."""
        histograms = []
        for request in requests:
            x, y = proxy_examples(request.population)
            histograms.append(self.evaluator.score(request.state, x, y).predicted)
        return histograms


def _label_histogram(requests: Requests) -> list[Tensor]:
    return [request.population.label_histogram(request.ids) for request in requests]


def _train_loss(requests: Requests) -> list[Tensor]:
    return [request.trained.loss for request in requests]


def _rms_loss(requests: Requests) -> list[Tensor]:
    return [request.trained.squared_loss.sqrt() for request in requests]


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


def _client_examples(request: ReportRequest) -> tuple[Tensor, Tensor, list[int]]:
    """Return the examples and labels of a lane's clients, one after the other, and the counts."""
    rows = [request.population.rows[client] for client in request.ids.tolist()]
    all_rows = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long)
    x, y = _examples(request.population, all_rows)
    return x, y, [len(client_rows) for client_rows in rows]


def _examples_of_each_client(requests: Requests) -> tuple[list[Tensor], list[Tensor]]:
    """Return the examples and labels of every client of all lanes, gathered in one pass."""
    rows: list[Tensor] = []
    for request in requests:
        rows += [request.population.rows[client] for client in request.ids.tolist()]
    all_rows = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long)
    x, y = _examples(requests[0].population, all_rows)
    counts = [len(client_rows) for client_rows in rows]
    return list(x.split(counts)), list(y.split(counts))


def _global_states(requests: Requests) -> Tensor:
    return torch.stack([request.state for request in requests])  # [R, d]


def _stack(scalars: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return scalars as a row, which may be empty, of the type of `like`."""
    return torch.stack(list(scalars)) if scalars else like.new_zeros(0)


def _per_client(
    requests: Requests,
    rows_of: Callable[[Sequence[TrainedClients]], Tensor],
    compute: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Compute something of every client's row; on a GPU, of all lanes at once.

    Args:
        requests: of the lanes.
        rows_of: `states_of` or `deltas_of`.
        compute: from rows `[J, d]` to one value or row for each.
    """
    clients = [request.trained for request in requests]
    if keeps_lanes_separate(clients[0].states.device):
        return [compute(rows_of([lane_clients])) for lane_clients in clients]
    counts = [lane_clients.ids.shape[0] for lane_clients in clients]
    return list(compute(rows_of(clients)).split(counts))


def _to_cpu(values: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU as float32, in one transfer."""
    same_shape = len({value.shape[1:] for value in values}) == 1
    rows = values if same_shape else [value.reshape(-1) for value in values]
    copied = torch.cat(list(rows)).detach().float().cpu().split([row.shape[0] for row in rows])
    if same_shape:
        return list(copied)
    return [part.view(value.shape) for part, value in zip(copied, values, strict=True)]
