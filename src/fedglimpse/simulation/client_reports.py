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

# Rows of all clients, one lane after the other `[J, ...]`; or one tensor for each lane.
Values = Tensor | Sequence[Tensor]


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
        norms = partial(torch.linalg.vector_norm, dim=1)
        self._reports: Mapping[str, Callable[[Requests], Values]] = {
            "label_histogram": _label_histograms,
            "loss": partial(self._losses, after_training=False),
            "gradient_distance": partial(self._distances, per_tensor=True),
            "gradient_distance_l2": partial(self._distances, per_tensor=False),
            "sketch": partial(self._of_parameters, rows_of=states_of, describe=sketch),
            "delta_sketch": partial(self._of_parameters, rows_of=deltas_of, describe=sketch),
            "update_norm": partial(self._of_parameters, rows_of=deltas_of, describe=norms),
            "train_loss": _train_losses,
            "rms_loss": _rms_losses,
            "loss_after": partial(self._losses, after_training=True),
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
            passes = [lanes]
            if name in self._alone:
                passes = [[r] for r in lanes]
            for lanes_of_pass in passes:
                lane_requests = [requests[r] for r in lanes_of_pass]
                values = self._reports[name](lane_requests)
                if isinstance(values, Tensor):
                    values = values.split([len(request.ids) for request in lane_requests])
                flat = torch.cat([value.flatten() for value in values])
                on_cpu = flat.detach().float().cpu()  # in one transfer
                pieces = on_cpu.split([value.numel() for value in values])
                for r, value, piece in zip(lanes_of_pass, values, pieces, strict=True):
                    rows = piece.view(value.shape)
                    reports[r][name] = rows.flatten(1) if rows.dim() > 2 else rows
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

    def _losses(self, requests: Requests, after_training: bool) -> Tensor:
        """Return the mean loss of a model on each client's examples `[J]`.

        Args:
            requests: of the lanes.
            after_training: of each client's trained model; else of its lane's global model, which
                is evaluated on the examples of all the lane's clients at once.
        """
        x, y, counts = _client_examples(requests)
        if after_training:
            states = torch.cat([clients.states for clients in _trained(requests)])  # [J, d]
            counts_of_states = counts
        else:
            states = torch.stack([request.state for request in requests])  # [R, d]
            counts_of_states = []  # examples of all clients of a lane
            first = 0
            for request in requests:
                last = first + len(request.ids)
                counts_of_states.append(sum(counts[first:last]))
                first = last
        if not counts:
            return states.new_zeros(0)
        losses = self.evaluator.losses(
            states,
            x.split(counts_of_states),
            y.split(counts_of_states),
        )
        losses_of_clients = torch.cat(losses).split(counts)
        return torch.stack([losses_of_client.mean() for losses_of_client in losses_of_clients])

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
            torch.stack([request.state for request in requests]),
            proxy_xs,
            proxy_ys,
        )
        x, y, counts = _client_examples(requests)
        gradients = self.evaluator.mean_gradients(
            torch.cat(states),
            x.split(counts),
            y.split(counts),
        )
        lane_gradients = gradients.split([len(request.ids) for request in requests])
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

    def _of_parameters(
        self,
        requests: Requests,
        rows_of: Callable[[Sequence[TrainedClients]], Tensor],
        describe: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Describe each client's trained parameters, or what training has added to them.

        Args:
            requests: of the lanes.
            rows_of: `states_of` or `deltas_of`.
            describe: a sketch or a norm of each row.
        """
        rows = rows_of(_trained(requests))  # [J, d]
        return describe(rows[:, : self.num_params])

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
        counts = [len(request.ids) for request in requests]
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
            return nothing.split(counts)
        logits = self.evaluator.logits_of(states, x)
        return logits.float().split(counts)

    # ---- Known to the server.

    def _global_sketches(self, requests: Requests) -> Sequence[Tensor]:
        states = torch.stack([request.state for request in requests])  # [R, d]
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


def _trained(requests: Requests) -> list[TrainedClients]:
    """Return the clients of each lane, which have trained."""
    trained: list[TrainedClients] = []
    for request in requests:
        if request.clients is None:
            ids = request.ids.tolist()
            raise ValueError(f"clients {ids} are asked for reports before training")
        trained.append(request.clients)
    return trained


def _of_phase(names: frozenset[str], phase: Phase) -> frozenset[str]:
    return frozenset(name for name in names if CATALOGUE[name].phase == phase)
