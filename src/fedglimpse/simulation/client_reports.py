"""What clients and server report: one function for each entry of `reports.CATALOGUE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedglimpse.data.population import Population
from fedglimpse.federation.devices import keeps_lanes_separate
from fedglimpse.federation.reports import CATALOGUE, Phase
from fedglimpse.federation.state import Layout
from fedglimpse.simulation.evaluation import Evaluator
from fedglimpse.simulation.lane import TrainedClients, deltas_of, states_of

Sketch = Callable[[Tensor], Tensor]  # [..., parameters] -> [..., D]

NOBODY = torch.zeros(0, dtype=torch.long)  # client ids
NO_ROWS = torch.zeros(0, dtype=torch.long)  # of a dataset

# On a CPU these are computed for each lane by itself, so that its bits do not depend on the others.
ALONE_ON_CPU = frozenset(
    {
        "sketch",
        "delta_sketch",
        "update_norm",
        "proxy_logits",
        "proxy_predictions",
        "global_sketch",
    }
)


@dataclass(frozen=True)
class ReportRequest:
    """The reports that one lane asks for in this round."""

    names: frozenset[str]  # of `reports.CATALOGUE`
    population: Population
    state: Tensor  # [d] the global model
    ids: Tensor  # [V] clients that report
    clients: TrainedClients | None = None  # the same clients, where they have trained


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
        self._alone: frozenset[str] = frozenset()  # reports of one lane at a time
        if keeps_lanes_separate(evaluator.device):
            self._alone = ALONE_ON_CPU
        self._reports: Mapping[str, Callable[[Requests], Sequence[Tensor]]] = {
            "label_histogram": _label_histograms,
            "loss": self._loss,
            "gradient_distance": partial(self._distances, per_tensor=True),
            "gradient_distance_l2": partial(self._distances, per_tensor=False),
            "sketch": self._sketches,
            "delta_sketch": self._delta_sketches,
            "update_norm": self._update_norms,
            "train_loss": _train_losses,
            "rms_loss": _rms_losses,
            "loss_after": self._loss_after,
            "delta_similarity": self._delta_similarity,
            "proxy_predictions": self._proxy_predictions,
            "proxy_logits": self._proxy_logits,
            "global_sketch": self._global_sketches,
            "proxy_histogram": self._proxy_histogram,
        }

    def report(self, requests: Mapping[int, ReportRequest]) -> dict[int, dict[str, Tensor]]:
        """Return the reports that each lane asks for: name -> tensor."""
        reports: dict[int, dict[str, Tensor]] = {}
        asking: dict[str, list[int]] = {}  # lanes by the report they ask for
        for r, request in requests.items():
            reports[r] = {}
            for name in request.names:
                asking.setdefault(name, []).append(r)
        asking.pop("reward", None)  # the server knows it after the round
        for name in sorted(asking):
            lanes = asking[name]
            lane_requests = [requests[r] for r in lanes]
            compute = self._reports[name]
            if name in self._alone:
                values = [compute([request])[0] for request in lane_requests]
            else:
                values = list(compute(lane_requests))
            for r, value in zip(lanes, _to_cpu(values), strict=True):
                if value.dim() > 2:
                    value = value.flatten(1)
                reports[r][name] = value
        return reports

    def probes(
        self, names: frozenset[str], state: Tensor, population: Population, ids: Tensor
    ) -> dict[str, Tensor]:
        """Return one lane's reports at the global model `[d]`, before training."""
        request = ReportRequest(
            names=_of_phase(names, "probe"),
            population=population,
            state=state,
            ids=ids,
        )
        return self.report({0: request})[0]

    def trained(
        self, names: frozenset[str], clients: TrainedClients, population: Population
    ) -> dict[str, Tensor]:
        """Return one lane's reports of clients that have trained."""
        request = ReportRequest(
            names=_of_phase(names, "trained"),
            population=population,
            state=clients.states.new_zeros(0),  # no such report reads the global model
            ids=clients.ids,
            clients=clients,
        )
        return self.report({0: request})[0]

    def server(
        self, names: frozenset[str], state: Tensor, population: Population
    ) -> dict[str, Tensor]:
        """Return what one lane's server knows of its global model `[d]`."""
        request = ReportRequest(
            names=_of_phase(names, "server"),
            population=population,
            state=state,
            ids=NOBODY,
        )
        return self.report({0: request})[0]

    # ---- At the global model, before training.

    def _loss(self, requests: Requests) -> Sequence[Tensor]:
        """Mean loss of each lane's global model on its clients' examples `[V]`."""
        x, y, counts = _client_examples(requests)
        lane_counts: list[int] = []  # examples of all clients of a lane
        first = 0
        for request in requests:
            last = first + len(request.ids)
            lane_counts.append(sum(counts[first:last]))
            first = last
        losses = self.evaluator.losses(
            _global_states(requests),
            x.split(lane_counts),
            y.split(lane_counts),
        )
        losses_of_clients = torch.cat(losses).split(counts)
        return _split(requests, _means(losses_of_clients, like=losses[0]))

    def _distances(self, requests: Requests, per_tensor: bool) -> list[Tensor]:
        """Distance of each client's full gradient from the proxy gradient `[V]`."""
        proxy_xs: list[Tensor] = []
        proxy_ys: list[Tensor] = []
        states: list[Tensor] = []
        for request in requests:
            x, y = proxy_examples(request.population)
            proxy_xs.append(x)
            proxy_ys.append(y)
            states.append(request.state.expand(len(request.ids), -1))
        proxy_gradients = self.evaluator.mean_gradients(
            _global_states(requests),
            proxy_xs,
            proxy_ys,
        )
        x, y, counts = _client_examples(requests)
        gradients = self.evaluator.mean_gradients(
            torch.cat(states),
            x.split(counts),
            y.split(counts),
        )
        lane_gradients = _split(requests, gradients)
        distances: list[Tensor] = []
        for of_clients, of_proxy in zip(lane_gradients, proxy_gradients, strict=True):
            distance = gradient_distance(
                self.evaluator.layout,
                of_clients,
                of_proxy,
                per_tensor,
            )
            distances.append(distance)
        return distances

    # ---- After training.

    def _sketches(self, requests: Requests) -> Sequence[Tensor]:
        states = states_of(_trained(requests))  # [J, d]
        sketches = self.sketch(states[:, : self.num_params])
        return _split(requests, sketches)

    def _delta_sketches(self, requests: Requests) -> Sequence[Tensor]:
        deltas = deltas_of(_trained(requests))  # [J, d]
        sketches = self.sketch(deltas[:, : self.num_params])
        return _split(requests, sketches)

    def _update_norms(self, requests: Requests) -> Sequence[Tensor]:
        deltas = deltas_of(_trained(requests))  # [J, d]
        norms = deltas[:, : self.num_params].norm(dim=1)
        return _split(requests, norms)

    def _loss_after(self, requests: Requests) -> Sequence[Tensor]:
        """Mean loss of each client's trained model on its examples `[V]`."""
        states = torch.cat([clients.states for clients in _trained(requests)])
        x, y, counts = _client_examples(requests)
        losses = self.evaluator.losses(
            states,
            x.split(counts),
            y.split(counts),
        )
        return _split(requests, _means(losses, like=states))

    def _delta_similarity(self, requests: Requests) -> list[Tensor]:
        similarities: list[Tensor] = []
        for clients in _trained(requests):
            deltas = deltas_of([clients])  # [V, d]
            similarities.append(cosines(deltas[:, : self.num_params]))
        return similarities

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
            lane_requests = [requests[i] for i in lanes]
            lane_logits = self._logits_in_one_pass(lane_requests)
            logits |= zip(lanes, lane_logits, strict=True)
        return [logits[i] for i in range(len(requests))]

    def _logits_in_one_pass(self, requests: Requests) -> Sequence[Tensor]:
        copies: list[Tensor] = []  # of each lane's proxy inputs, one for each client
        for request in requests:
            x, _ = proxy_examples(request.population)
            num_clients = len(request.ids)
            copies.append(x.expand(num_clients, *x.shape))
        x = copies[0]  # one lane needs no copy
        if len(copies) > 1:
            x = torch.cat(copies)  # [J, P, *shape]
        states = states_of(_trained(requests))  # [J, d]
        if not len(states):
            num_classes = self.evaluator.num_classes
            nothing = states.new_zeros(0, x.shape[1], num_classes)
            return _split(requests, nothing)
        logits = self.evaluator.logits_of(states, x)
        return _split(requests, logits.float())

    # ---- Known to the server.

    def _global_sketches(self, requests: Requests) -> Sequence[Tensor]:
        states = _global_states(requests)
        sketches = self.sketch(states[:, : self.num_params])
        return sketches.unbind()

    def _proxy_histogram(self, requests: Requests) -> list[Tensor]:
        """Shares of classes that each lane's global model predicts on its proxy set `[C]`."""
        shares: list[Tensor] = []
        for request in requests:
            x, y = proxy_examples(request.population)
            scores = self.evaluator.score(request.state, x, y)
            shares.append(scores.predicted)
        return shares


def _label_histograms(requests: Requests) -> list[Tensor]:
    return [request.population.label_histogram(request.ids) for request in requests]


def _train_losses(requests: Requests) -> list[Tensor]:
    return [clients.loss for clients in _trained(requests)]


def _rms_losses(requests: Requests) -> list[Tensor]:
    return [clients.squared_loss.sqrt() for clients in _trained(requests)]


def gradient_distance(
    layout: Layout, gradients: Tensor, reference: Tensor, per_tensor: bool
) -> Tensor:
    """Return how far gradients `[..., num_params]` are from a reference one `[...]`.

    Args:
        layout: of the model.
        gradients: the gradients.
        reference: the gradient to compare with.  # [num_params]
        per_tensor: sum the norms of all parameter tensors, as the authors of HA-EdgeFLow do; else
            one norm of the whole difference.
    """
    difference = gradients - reference
    if not per_tensor:
        return difference.norm(dim=-1)
    norms: list[Tensor] = []
    for entry in layout.params:
        of_tensor = difference[..., entry.start : entry.stop]
        norms.append(of_tensor.norm(dim=-1))
    return torch.stack(norms).sum(0)


def cosines(rows: Tensor) -> Tensor:
    """Return the cosines between all rows `[V, V]`; 0 where a row is zero."""
    norms = rows.norm(dim=1, keepdim=True)
    unit = torch.where(norms > 0, rows / norms.clamp(min=1e-30), 0.0)
    return unit @ unit.T


def proxy_examples(population: Population) -> tuple[Tensor, Tensor]:
    """Return the server's proxy examples and labels."""
    dataset = population.dataset
    rows = population.proxy.to(dataset.y_train.device)
    return dataset.x_train[rows], dataset.y_train[rows]


def _client_examples(requests: Requests) -> tuple[Tensor, Tensor, list[int]]:
    """Return the examples of all clients of all lanes, gathered in one pass.

    Returns:
        Examples and labels, one client after the other, and how many each client has.
    """
    rows = [NO_ROWS]  # there may be no client
    counts: list[int] = []
    for request in requests:
        for client in request.ids.tolist():
            client_rows = request.population.rows[client]
            rows.append(client_rows)
            counts.append(len(client_rows))
    dataset = requests[0].population.dataset
    joined_rows = torch.cat(rows).to(dataset.y_train.device)
    return dataset.x_train[joined_rows], dataset.y_train[joined_rows], counts


def _means(losses: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the mean of each client's losses `[V]`, of the type of `like`; there may be none."""
    if not losses:
        return like.new_zeros(0)
    return torch.stack([loss.mean() for loss in losses])


def _global_states(requests: Requests) -> Tensor:
    return torch.stack([request.state for request in requests])  # [R, d]


def _trained(requests: Requests) -> list[TrainedClients]:
    """Return the clients of each lane, which have trained."""
    trained: list[TrainedClients] = []
    for request in requests:
        if request.clients is None:
            ids = request.ids.tolist()
            raise ValueError(f"clients {ids} are asked for reports before training")
        trained.append(request.clients)
    return trained


def _split(requests: Requests, rows: Tensor) -> Sequence[Tensor]:
    """Return the rows `[J, ...]` of all clients lane by lane."""
    counts = [request.ids.shape[0] for request in requests]
    return rows.split(counts)


def _to_cpu(values: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the CPU as float32, in one transfer."""
    flat_values = [value.reshape(-1) for value in values]
    floats = torch.cat(flat_values).detach().float()
    floats = floats.cpu()
    on_cpu: list[Tensor] = []
    first = 0
    for value in values:
        last = first + value.numel()
        on_cpu.append(floats[first:last].view(value.shape))
        first = last
    return on_cpu


def _of_phase(names: frozenset[str], phase: Phase) -> frozenset[str]:
    return frozenset(name for name in names if CATALOGUE[name].phase == phase)
