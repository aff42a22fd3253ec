"""The terms of the paper's convergence bound (Hou et al., Theorem 1) at one stored model.

docs/theory.md states the theorem and its symbols: F is the mean loss of all clients, F_C of the
visible and F_S of the chosen ones. [d] is a whole state, [P] its parameters, which come first.
Gradients are taken in evaluation mode, as in `simulation/evaluation.py`: BatchNorm uses its running
statistics, so that a client's gradient is the mean of those of its batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data.population import Population
from fedglimpse.simulation.evaluation import Evaluator

LARGE_BATCH = 200  # where only the mean gradient matters, and not how noisy batches are


@dataclass(frozen=True)
class ClientGradient:
    """The loss of one client and its gradient at one model, and how noisy batches are."""

    loss: float  # F_n
    gradient: Tensor  # [P] of F_n, parameters only
    noise: float  # mean ||g_b - gradient||^2 over its batches
    second_moment: float  # mean ||g_b||^2 over its batches


@dataclass(frozen=True)
class Measurement:
    """The terms in one round of one lane; norms are squared, as in the theorem."""

    round: int
    loss: float  # F(W)
    gradient: float  # ||grad F(W)||^2
    gap: float  # d^2 = ||grad F - grad F_C||^2
    spread: float  # Gamma^2, mean over C of ||grad F_n - grad F_C||^2
    deviation: float  # ||grad F_C - grad F_S||^2
    weighted_deviation: float  # the same with the weights that were applied, scaled to sum to 1
    random_deviation: float  # mean over uniformly random choices of as many clients
    second_moment: float  # G^2, largest of the visible clients
    noise: float  # sigma^2, largest of the visible clients
    smoothness: float  # L, largest secant over one local step of the visible clients
    visible: int  # |C|
    selected: int  # |S|
    delta_q: float | None = None  # best Q minus mean Q of the visible clients
    mu: float | None = None  # largest mu of quadratic growth that their Q-values allow
    l_q: float | None = None  # smallest L_Q that their Q-values allow


@dataclass(frozen=True)
class LaneProbe:
    """Takes gradients of one lane's clients at any model, as local training would."""

    evaluator: Evaluator
    population: Population
    seed: int  # of the lane
    lr: float  # eta
    batch_size: int
    max_examples: int = 0  # examples of a client that are used; 0: all

    def measure(self, state: Tensor, record: Mapping[str, Any]) -> Measurement | None:
        """Measure one model; None where no client was chosen in the round.

        Args:
            state: the global model.  # [d]
            record: of the round that started from it.
        """
        if not record["selected"]:
            return None
        round_num = record["round"]
        visible: list[int] = []
        for client in record["visible"]:
            if self.population.sizes[client]:
                visible.append(client)
        loss, objective, of_visible = self._all_gradients(state, visible, round_num)
        rows = [of_visible[client].gradient for client in visible]
        gradients = torch.stack(rows).double()  # [V, P]
        cluster = gradients.mean(0)
        distances = (gradients - cluster).square().sum(1)  # [V]
        spread = float(distances.mean())
        positions = [visible.index(client) for client in record["selected"]]
        chosen = gradients[torch.tensor(positions)]  # [K, P]
        weights = torch.tensor(record["weights"], dtype=torch.double)
        weighted_mean = _weighted_mean(chosen, weights)
        return Measurement(
            round=round_num,
            loss=loss,
            gradient=_squared_norm(objective),
            gap=_squared_norm(objective - cluster),
            spread=spread,
            deviation=_squared_norm(cluster - chosen.mean(0)),
            weighted_deviation=_squared_norm(cluster - weighted_mean),
            random_deviation=random_deviation(spread, len(visible), len(chosen)),
            second_moment=max(client.second_moment for client in of_visible.values()),
            noise=max(client.noise for client in of_visible.values()),
            smoothness=self._smoothness(state, of_visible, round_num),
            visible=len(visible),
            selected=len(chosen),
            **_terms_of_q(gradients, visible, record),
        )

    def _all_gradients(
        self,
        state: Tensor,
        visible: Sequence[int],
        round_num: int,
    ) -> tuple[float, Tensor, dict[int, ClientGradient]]:
        """Return F and its gradient `[P]` over all clients, and the gradients of visible ones."""
        losses = []
        total = None
        of_visible = {}
        for client, size in enumerate(self.population.sizes):
            if not size:
                continue
            batch_size = self.batch_size if client in visible else LARGE_BATCH
            measured = self._client_gradient(state, client, round_num, batch_size)
            losses.append(measured.loss)
            total = measured.gradient.double() if total is None else total + measured.gradient
            if client in visible:
                of_visible[client] = measured
        assert total is not None
        count = len(losses)
        return sum(losses) / count, total / count, of_visible

    def _client_gradient(
        self,
        state: Tensor,
        client: int,
        round_num: int,
        batch_size: int,
    ) -> ClientGradient:
        draw = rng.generator(self.seed, "theory", round_num, client)
        x, y = examples_of(self.population, client, self.max_examples, draw)
        return client_gradient(self.evaluator, state, x, y, batch_size)

    def _smoothness(
        self,
        state: Tensor,
        clients: Mapping[int, ClientGradient],
        round_num: int,
    ) -> float:
        """Return the largest ||grad F_n(W - eta g) - g|| / ||eta g||, g the gradient at W."""
        largest = 0.0
        for client, before in clients.items():
            num_parameters = len(before.gradient)  # they come first; buffers do not move
            step = torch.zeros_like(state)
            step[:num_parameters] = self.lr * before.gradient
            length = step.norm()
            if not float(length):
                continue
            # the same draw as before, so on the same examples
            after = self._client_gradient(state - step, client, round_num, LARGE_BATCH)
            change = after.gradient - before.gradient
            largest = max(largest, float(change.norm() / length))
        return largest


def column(points: Sequence[Measurement], name: str) -> list[Any]:
    """Return one field of every measurement."""
    return [getattr(point, name) for point in points]


def examples_of(
    population: Population,
    client: int,
    max_examples: int,
    draw: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return a client's examples in random order, at most `max_examples` of them (0: all)."""
    dataset = population.dataset
    rows = population.rows[client]
    order = torch.randperm(len(rows), generator=draw)
    rows = rows[order]
    if max_examples:
        rows = rows[:max_examples]
    rows = rows.to(dataset.y_train.device)
    return dataset.x_train[rows], dataset.y_train[rows]


def client_gradient(
    evaluator: Evaluator,
    state: Tensor,
    x: Tensor,
    y: Tensor,
    batch_size: int,
) -> ClientGradient:
    """Go once over the examples in batches, as an epoch of training does.

    Args:
        evaluator: holds the model.
        state: where gradients are taken.  # [d]
        x: raw examples in the order of the epoch.  # [n, *shape]
        y: their labels.  # [n]
        batch_size: a last batch of one example is skipped by training: it counts towards the mean
            gradient, but not towards the noise of batches.
    """
    evaluator.load(state)
    loss = 0.0
    gradients = []
    shares = []  # of the examples that each batch holds
    is_step: list[bool] = []  # whether training would take a step on the batch
    batches = zip(x.split(batch_size), y.split(batch_size), strict=True)
    for batch_x, batch_y in batches:
        batch_loss, gradient = batch_gradient(evaluator, batch_x, batch_y)
        share = torch.tensor(len(batch_y) / len(y))
        loss += float(share) * batch_loss
        gradients.append(gradient)
        shares.append(share)
        # The only example of a client counts, so that its noise is 0 and not undefined.
        is_step.append(len(batch_y) > 1 or not is_step)
    of_batches = torch.stack(gradients)  # [batches, P]
    weights = torch.stack(shares).to(of_batches)  # [batches]
    mean = (weights[:, None] * of_batches).sum(0)
    of_steps = of_batches[torch.tensor(is_step)]
    return ClientGradient(
        loss=loss,
        gradient=mean,
        noise=_mean_squared_norm(of_steps - mean),
        second_moment=_mean_squared_norm(of_steps),
    )


def batch_gradient(evaluator: Evaluator, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    """Return the mean loss of the loaded model on a batch and its gradient `[P]`."""
    logits = evaluator.forward(x).float()
    loss = F.cross_entropy(logits, y)
    of_parameters = torch.autograd.grad(
        loss,
        list(evaluator.model.parameters()),
        materialize_grads=True,
    )
    gradient = torch.cat([part.flatten() for part in of_parameters])
    return float(loss.detach()), gradient


def random_deviation(spread: float, visible: int, selected: int) -> float:
    """Return the mean of ||grad F_C - grad F_S||^2 over all subsets of `selected` clients."""
    if visible < 2:
        return 0.0
    return spread * (visible - selected) / (selected * (visible - 1))


def implied_q(gradients: Tensor, q: Tensor) -> dict[str, float | None]:
    """Return Delta_Q, mu and L_Q that the Q-values of one round imply.

    The theorem compares clients with v*, where Q is largest; here that is the client with the
    largest Q-value. mu is the largest constant for which quadratic growth holds at all others, L_Q
    the smallest for which the smoothness inequality does. Delta_Q uses the mean Q-value instead of
    Q(grad F_C), since the Q-network is never asked about a mean gradient.

    Args:
        gradients: of the clients.  # [V, P]
        q: their Q-values.  # [V]
    """
    best = int(q.argmax())
    distance = (gradients - gradients[best]).square().sum(1)  # [V]
    apart = distance > 0
    if not bool(apart.any()):
        return {"delta_q": None, "mu": None, "l_q": None}
    q_gap = q[best] - q[apart]
    ratios = 2 * q_gap / distance[apart]
    return {
        "delta_q": float(q[best] - q.mean()),
        "mu": float(ratios.min()),
        "l_q": float(ratios.max()),
    }


def _terms_of_q(
    gradients: Tensor,
    visible: Sequence[int],
    record: Mapping[str, Any],
) -> dict[str, float | None]:
    """Return what a method's recorded Q-values imply; nothing for a method without them."""
    scored: list[int] = []  # rows of the clients that have a Q-value
    for row, client in enumerate(visible):
        if client not in record["rejected"]:
            scored.append(row)
    q = record.get("q")
    if q is None or len(q) != len(scored):  # the Q-values of other clients than these
        return {}
    return implied_q(gradients[scored], torch.tensor(q, dtype=torch.double))


def _weighted_mean(gradients: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of gradients `[K, P]`; all-zero weights count as equal ones."""
    if not float(weights.sum()):
        weights = torch.ones_like(weights)
    shares = weights / weights.sum()
    return shares.to(gradients) @ gradients


def _squared_norm(vector: Tensor) -> float:
    return float(vector.double().square().sum())


def _mean_squared_norm(rows: Tensor) -> float:
    """Return the mean over rows of their squared norms."""
    squared_norms = rows.double().square().sum(1)
    return float(squared_norms.mean())
