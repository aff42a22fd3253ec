"""One federation among those that run side by side, and what happens in it in one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedglimpse.data.population import Population
from fedglimpse.federation.aggregation import step_lanes
from fedglimpse.federation.costs import Activity
from fedglimpse.federation.reports import ORACLES, trains_before_choice
from fedglimpse.simulation.evaluation import Reward
from fedglimpse.simulation.plugin_checks import checked_step
from fedglimpse.simulation.trained_clients import TrainedClients, deltas_of
from fedglimpse.types import Choice, Method, Update, View, Visibility


@dataclass(eq=False)  # compared by identity
class Lane:
    """One federation: its clients, who can be seen, and the method that runs it."""

    seed: int
    population: Population
    visibility: Visibility
    method: Method
    reward: Reward
    k: int
    min_visible: int = 1  # rounds with fewer visible clients pass without training
    round_num: int = 0  # rounds finished
    visits: int = 0  # local trainings in all rounds

    @property
    def trains_first(self) -> bool:
        """True where all visible clients train before the choice."""
        return trains_before_choice(self.method.selector.needs)

    @property
    def needs_after(self) -> frozenset[str]:
        """Reports that only the chosen clients send."""
        return self.method.selector.learns_from | self.method.aggregator.needs

    @property
    def oracle(self) -> bool:
        """True where the method reads what no server may know."""
        return not ORACLES.isdisjoint(self.method.selector.needs | self.needs_after)


@dataclass
class LaneRound:
    """What one lane has seen and done in the current round, filled in step by step."""

    round_num: int
    examples: Mapping[int, int]  # local examples of every visible client, by id
    ids: Tensor  # [V] clients that can be chosen: with data, and a finite update if they trained
    sizes: Tensor  # [V] their local examples
    passes: bool  # too few clients are visible: the round passes without training
    trained_ids: Sequence[int] = ()
    rejected_ids: Sequence[int] = ()  # of clients whose update was not finite
    train_loss: float | None = None  # mean over the clients whose update was finite
    candidates: TrainedClients | None = None  # of `ids`, where they train before the choice
    view: View | None = None  # None: there is nobody to choose from
    choice_info: Mapping[str, Any] = field(default_factory=dict)
    selected: Tensor | None = None  # [K] ids whose update is used; None: nobody was chosen
    weights: Tensor = field(default_factory=lambda: torch.zeros(0))  # [K] of them, float64
    reports: dict[str, Tensor] = field(default_factory=dict)  # what only the selected send

    @staticmethod
    def begin(lane: Lane) -> LaneRound:
        """Determine which clients are visible."""
        visible = lane.visibility.visible(lane.seed, lane.round_num)
        sizes = lane.population.sizes[visible]
        examples = dict(zip(visible.tolist(), sizes.tolist(), strict=True))
        if not all(examples.values()):
            has_data = sizes > 0
            visible = visible[has_data]
            sizes = sizes[has_data]
        passes = visible.shape[0] < max(lane.min_visible, 1)
        return LaneRound(lane.round_num, examples, visible, sizes, passes)

    def note_training(self, lane: Lane, ids: Tensor, clients: TrainedClients) -> None:
        """Note that the clients `ids` have trained; `clients` are those with a finite update."""
        lane.visits += len(ids)
        finite_ids = set(clients.ids.tolist())
        self.trained_ids = ids.tolist()
        self.rejected_ids = [client for client in self.trained_ids if client not in finite_ids]
        if finite_ids:
            self.train_loss = float(clients.loss.mean())

    def set_candidates(self, clients: TrainedClients) -> None:
        """Let only clients be chosen that have trained with a finite update."""
        self.candidates = clients
        self.ids = clients.ids
        if self.rejected_ids:
            self.sizes = self.sizes_of(clients.ids)

    def select(self, choice: Choice, clients: TrainedClients) -> None:
        """Note whose updates are used, and with which weights.

        Args:
            choice: the answer of the selector.
            clients: the chosen clients whose update is finite.
        """
        self.choice_info = choice.info
        self.selected = clients.ids
        chosen_ids = self.ids[choice.slots].tolist()
        usable = [i for i, client in enumerate(chosen_ids) if client not in self.rejected_ids]
        weights = choice.weights_at(usable)
        if weights is None:
            sizes = self.sizes_of(clients.ids).double()
            weights = sizes / sizes.sum()
        self.weights = weights

    def sizes_of(self, ids: Tensor) -> Tensor:
        """Return the local examples of visible clients `[n]`, int64."""
        return torch.tensor([self.examples[client] for client in ids.tolist()], dtype=torch.long)

    def activity(self, lane: Lane, selector_flops: int) -> Activity:
        """Count what the round did, for its costs; a round that passes asks nothing of anyone."""
        has_view = self.view is not None
        visible = self.examples if has_view or self.trained_ids else {}
        selected = [] if self.selected is None else self.selected.tolist()
        return Activity(
            needs=lane.method.selector.needs if visible else frozenset(),
            needs_after=lane.needs_after if has_view else frozenset(),
            visible=len(visible),
            visible_examples=sum(visible.values()),
            trained=len(self.trained_ids),
            trained_examples=sum(map(self.examples.__getitem__, self.trained_ids)),
            chosen=len(selected),
            chosen_examples=sum(map(self.examples.__getitem__, selected)),
            selector_flops=selector_flops,
            distils=lane.method.objective.distill > 0,
        )


def step_alone(
    lane: Lane, lane_round: LaneRound, state: Tensor, clients: TrainedClients, num_params: int
) -> None:
    """Replace the global model `state` `[d]` of one lane by the next one.

    Args:
        lane: the lane.
        lane_round: its round; its weights become those that the aggregator applied.
        state: the global model.
        clients: those whose updates are used, at least one.
        num_params: the first floats of a state are parameters, the rest are buffers.
    """
    aggregator = lane.method.aggregator
    reports = lane_round.reports
    update = Update(
        round_num=lane_round.round_num,
        ids=clients.ids,
        sizes=lane_round.sizes_of(clients.ids),
        starts=clients.starts,
        deltas=clients.deltas,
        weights=lane_round.weights.to(state),
        num_params=num_params,
        reports={name: reports[name] for name in aggregator.needs if name in reports},
    )
    state.copy_(checked_step(aggregator, state.clone(), update))
    if aggregator.applied is not None:
        lane_round.weights = aggregator.applied.cpu().double()


def step_together(
    lanes: Sequence[Lane],
    rounds: Sequence[LaneRound],
    states: Tensor,
    clients: Sequence[TrainedClients],
    num_params: int,
) -> Tensor:
    """Return the next global states `[R, d]` of lanes with equal `batch_key`, in one pass.

    `step_alone` is the readable twin.

    Args:
        lanes: R lanes.
        rounds: their rounds.
        states: their global states, which their aggregators keep.  # [R, d]
        clients: those whose updates are used, the same number in every lane.
        num_params: as in `step_alone`.
    """
    weights = torch.stack([lane_round.weights for lane_round in rounds]).to(states.dtype)
    sizes = [r.sizes_of(trained.ids) for r, trained in zip(rounds, clients, strict=True)]
    update = Update(
        round_num=-1,  # every lane counts its own
        ids=torch.stack([trained.ids for trained in clients]),
        sizes=torch.stack(sizes),
        starts=states[:, None],
        deltas=deltas_of(clients).unflatten(0, (len(clients), -1)),  # [R, K, d]
        weights=weights.to(states.device, non_blocking=True),
        num_params=num_params,
        reports={},
    )
    return step_lanes([lane.method.aggregator for lane in lanes], states, update)
