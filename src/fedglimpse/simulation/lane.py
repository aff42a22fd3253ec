"""One federation among those that run side by side, and one round of it from start to result.

A `Lane` is a federation, `TrainedClients` are those of its clients that have trained in a round,
`LaneRound` is what it has seen and done in that round, and `RoundResults` are the outcomes and
records of a finished round of all lanes. Functions that take several lanes do in one pass what
their readable twins do for one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from fedglimpse.data.population import Population
from fedglimpse.federation.aggregation import step_lanes
from fedglimpse.federation.costs import CostModel
from fedglimpse.federation.reports import ORACLES, trains_before_choice
from fedglimpse.simulation.evaluation import PendingScores, Reward, Scores
from fedglimpse.simulation.plugin_checks import (
    COUNTED_METRIC,
    checked_step,
    plain_metrics,
)
from fedglimpse.types import Choice, Method, Outcome, RoundRecord, Update, View, Visibility


@dataclass(eq=False)  # compared by identity
class Lane:
    """One federation: its clients, who can be seen, and the method that runs it.

    What the method needs is looked up once: it cannot change in the middle of a run.
    """

    seed: int
    population: Population
    visibility: Visibility
    method: Method
    reward: Reward
    k: int
    min_visible: int = 1  # rounds with fewer visible clients pass without training
    round_num: int = 0  # rounds finished
    visits: int = 0  # local trainings in all rounds

    @cached_property
    def trains_first(self) -> bool:
        """True where all visible clients train before the choice."""
        return trains_before_choice(self.method.selector.needs)

    @cached_property
    def needs_after(self) -> frozenset[str]:
        """Reports that only the chosen clients send."""
        return self.method.selector.learns_from | self.method.aggregator.needs

    @cached_property
    def oracle(self) -> bool:
        """True where the method reads what no server may know."""
        return not ORACLES.isdisjoint(self.method.selector.needs | self.needs_after)


@dataclass(frozen=True)
class TrainedClients:
    """Clients of one lane that have trained in a round."""

    ids: Tensor  # [V] on the CPU
    starts: Tensor  # [V, d] what they trained from; stride 0 where all started from the same state
    states: Tensor  # [V, d] their trained states
    loss: Tensor  # [V] mean training loss, on the CPU
    squared_loss: Tensor  # [V] mean squared training loss of an example, on the CPU

    def pick(self, slots: Tensor) -> TrainedClients:
        """Return the clients at these positions, in this order."""
        return pick_each([self], [slots])[0]

    @staticmethod
    def joined(links: Sequence[TrainedClients]) -> TrainedClients:
        """Return the clients that trained one after another, in order."""
        columns: dict[str, Tensor] = {}
        for column in fields(TrainedClients):
            values = [getattr(clients, column.name) for clients in links]
            columns[column.name] = torch.cat(values)
        return TrainedClients(**columns)


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
        if choice.weights is None:
            sizes = self.sizes[choice.slots[usable]].double()
            self.weights = sizes / sizes.sum()
        else:
            self.weights = cast(Tensor, choice.weights_at(usable))


@dataclass(frozen=True)
class RoundResults:
    """One finished round of all lanes; lanes that leave or restart afterwards do not matter.

    On a GPU the scores may still be on their way, so that a server can send its clients off to the
    next round before it reads them.
    """

    lanes: Sequence[Lane]
    rounds: Sequence[LaneRound]
    proxy_scores: Sequence[PendingScores]  # of the lanes in which clients were chosen
    test_scores: Sequence[PendingScores]  # of the lanes that are evaluated in this round
    costs: CostModel

    def outcomes(self) -> list[Outcome | None]:
        """Return what selectors learn from, and update the rewards; to be called once."""
        outcomes: list[Outcome | None] = [None] * len(self.lanes)
        proxy_scores: dict[int, Scores] = {}
        for pending in self.proxy_scores:
            proxy_scores |= pending.wait()
        for r, scores in proxy_scores.items():
            lane = self.lanes[r]
            lane_round = self.rounds[r]
            assert lane_round.selected is not None
            learns_from = lane.method.selector.learns_from
            reports = lane_round.reports
            reward = lane.reward.update(scores)
            outcomes[r] = Outcome(
                round_num=lane_round.round_num,
                selected=lane_round.selected,
                reward=reward.total,
                score=reward.score,
                per_class=scores.per_class_f1,
                reward_per_class=reward.per_class,
                weights=lane_round.weights.float(),
                reports={name: reports[name] for name in reports if name in learns_from},
            )
        return outcomes

    def records(self, metrics: Sequence[Mapping[str, float] | None]) -> list[dict[str, Any]]:
        """Return one record for each lane, without its wall time; call `outcomes` before.

        Args:
            metrics: what each selector's feedback returned.
        """
        test_scores: dict[int, Scores] = {}
        for pending in self.test_scores:
            test_scores |= pending.wait()
        records: list[dict[str, Any]] = []
        for r, lane_metrics in enumerate(metrics):
            record = self._record(r, lane_metrics, test_scores.get(r))
            records.append(record.to_json())
        return records

    def _record(
        self, r: int, feedback: Mapping[str, float] | None, scores: Scores | None
    ) -> RoundRecord:
        lane = self.lanes[r]
        lane_round = self.rounds[r]
        selected: list[int] = []
        if lane_round.selected is not None:
            selected = lane_round.selected.tolist()
        selector_name = type(lane.method.selector).__name__
        feedback_source = f"What {selector_name}.feedback() returned"
        info_source = f"Choice.info of {selector_name}.select()"
        extra = dict(plain_metrics(lane_round.choice_info, info_source))
        metrics = dict(plain_metrics(feedback, feedback_source))
        selector_flops = int(metrics.pop(COUNTED_METRIC, 0))  # counted in the cost
        cost = self.costs.round(
            lane.method,
            lane_round.examples,
            trained=lane_round.trained_ids,
            selected=selected,
            has_choice=lane_round.view is not None,
            selector_flops=selector_flops,
        )
        return RoundRecord(
            lane=r,
            seed=lane.seed,
            round=lane_round.round_num,
            visible=list(lane_round.examples),
            selected=selected,
            rejected=list(lane_round.rejected_ids),
            weights=lane_round.weights.tolist(),
            accuracy=None if scores is None else scores.accuracy,
            macro_f1=None if scores is None else scores.macro_f1,
            per_class_f1=None if scores is None else scores.per_class_f1.tolist(),
            loss=None if scores is None else scores.loss,
            train_loss=lane_round.train_loss,
            reward=lane.reward.total,
            extra=extra | metrics,
            uplink_bytes=cost.uplink_bytes,
            downlink_bytes=cost.downlink_bytes,
            client_flops=cost.client_flops,
            server_flops=cost.server_flops,
            oracle=True if lane.oracle else None,
        )


def step_alone(
    lane: Lane,
    lane_round: LaneRound,
    state: Tensor,
    clients: TrainedClients,
    num_params: int,
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
        sizes=lane.population.sizes[clients.ids],
        starts=clients.starts,
        deltas=clients.states - clients.starts,
        weights=lane_round.weights.to(state),
        num_params=num_params,
        reports={name: reports[name] for name in aggregator.needs if name in reports},
    )
    new_state = checked_step(aggregator, state.clone(), update)
    state.copy_(new_state)
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
    weights = torch.stack([lane_round.weights for lane_round in rounds])
    weights = weights.to(states.dtype)
    sizes: list[Tensor] = []
    for lane, trained in zip(lanes, clients, strict=True):
        sizes.append(lane.population.sizes[trained.ids])
    deltas = deltas_of(clients)  # [R * K, d]
    update = Update(
        round_num=-1,  # every lane counts its own
        ids=torch.stack([trained.ids for trained in clients]),
        sizes=torch.stack(sizes),
        starts=states[:, None],
        deltas=deltas.unflatten(0, (len(clients), -1)),  # [R, K, d]
        weights=weights.to(states.device, non_blocking=True),
        num_params=num_params,
        reports={},
    )
    aggregators = [lane.method.aggregator for lane in lanes]
    return step_lanes(aggregators, states, update)


def pick_each(clients: Sequence[TrainedClients], slots: Sequence[Tensor]) -> list[TrainedClients]:
    """Pick clients of every lane by position; the states of all lanes are copied in one pass.

    Args:
        clients: of each lane.
        slots: the positions in each lane, on the CPU.
    """
    rows: list[int] = []  # positions among the clients of all lanes
    first_row = 0  # of a lane
    for trained, lane_slots in zip(clients, slots, strict=True):
        rows += (first_row + lane_slots).tolist()
        first_row += trained.ids.shape[0]
    device = clients[0].states.device
    row_index = torch.tensor(rows, dtype=torch.long)
    row_index = row_index.to(device, non_blocking=True)
    states = states_of(clients)[row_index]
    picked = []
    first_row = 0  # of a lane in `states`
    for trained, lane_slots in zip(clients, slots, strict=True):
        last_row = first_row + lane_slots.shape[0]
        if trained.starts.stride(0) == 0:  # all started from the same state: nothing to copy
            starts = trained.starts[: lane_slots.shape[0]]
        else:
            starts = trained.starts[lane_slots.to(device)]
        picked.append(
            TrainedClients(
                ids=trained.ids[lane_slots],
                starts=starts,
                states=states[first_row:last_row],
                loss=trained.loss[lane_slots],
                squared_loss=trained.squared_loss[lane_slots],
            )
        )
        first_row = last_row
    return picked


def deltas_of(clients: Sequence[TrainedClients]) -> Tensor:
    """Return the deltas of all lanes' clients, one lane after the other `[J, d]`."""
    states = states_of(clients)
    starts = [trained.starts for trained in clients]
    count = starts[0].shape[0]
    if count and all(rows.shape[0] == count and rows.stride(0) == 0 for rows in starts):
        lane_starts = torch.cat([rows[:1] for rows in starts])  # [R, d] one for each lane is enough
        lane_states = states.unflatten(0, (-1, count))  # [R, K, d]
        return (lane_states - lane_starts[:, None]).flatten(0, 1)
    return states - torch.cat(starts)


def states_of(clients: Sequence[TrainedClients]) -> Tensor:
    """Return the states of all lanes' clients to read, one lane after the other `[J, d]`.

    A trainer returns the states of all lanes as one table, of which each lane gets a slice. Where
    the states lie one after the other in memory, the result is that table and not a copy.
    """
    first = clients[0].states
    width = first.shape[1]
    row_bytes = width * first.element_size()
    begin = first.data_ptr()
    memory = first.untyped_storage()
    rows = 0
    is_one_table = True
    for trained in clients:
        states = trained.states
        follows = states.data_ptr() == begin + rows * row_bytes and states.is_contiguous()
        same_kind = states.shape[1] == width and states.dtype == first.dtype
        is_one_table = is_one_table and follows and same_kind
        rows += states.shape[0]
    if begin + rows * row_bytes > memory.data_ptr() + memory.nbytes():
        is_one_table = False  # neighbours by chance, in memory of different tensors
    if is_one_table:
        return first.as_strided((rows, width), (width, 1))
    return torch.cat([trained.states for trained in clients])
