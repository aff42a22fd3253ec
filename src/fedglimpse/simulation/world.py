"""The simulated federation: what a server can observe of it, and what its choices lead to.

A World runs R lanes (seeds, or methods on the same model) side by side. One round is

    training = world.start_round()
    views = world.views(training)
    choices = selectors.select(views)
    world.aggregate(world.collect(choices))
    results = world.score(on_test)

It knows nothing about methods beyond what their selectors and aggregators need, and nothing about
files or progress bars.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedglimpse import rng
from fedglimpse.data.dataset import Dataset
from fedglimpse.federation.aggregation import batch_key
from fedglimpse.federation.costs import CostModel
from fedglimpse.federation.devices import keeps_lanes_separate
from fedglimpse.federation.reports import SERVER_REPORTS
from fedglimpse.simulation.client_reports import Reporter, ReportRequest, proxy_examples
from fedglimpse.simulation.evaluation import Evaluator, PendingScores
from fedglimpse.simulation.lane import (
    Lane,
    LaneRound,
    RoundResults,
    TrainedClients,
    pick_each,
    step_alone,
    step_together,
)
from fedglimpse.simulation.local_training import (
    ClientRows,
    RunningTraining,
    launch,
    train_in_turn,
)
from fedglimpse.simulation.plugin_checks import check_method, check_state
from fedglimpse.simulation.trainers.jobs import LocalTrainer
from fedglimpse.types import Choice, View

__all__ = ["Lane", "World"]

LARGEST_PASS = 2**27  # floats of client states that are aggregated at once, half a GiB


@dataclass(frozen=True)
class EvaluationSet:
    """Examples on which the models of some lanes are scored in one pass."""

    positions: Sequence[int]  # of S lanes in the world
    x: Tensor  # [S, n, *shape], with stride 0 in front where all lanes have the same examples
    y: Tensor  # [S, n]


class World:
    """R federations under partial visibility, trained together."""

    def __init__(
        self,
        dataset: Dataset,
        lanes: Sequence[Lane],
        start: Tensor,
        trainer: LocalTrainer,
        evaluator: Evaluator,
        reporter: Reporter,
        costs: CostModel,
    ) -> None:
        """Put lanes at their initial states.

        Args:
            dataset: on the training device, shared by all lanes.
            lanes: the federations.
            start: initial global states.  # [R, d]
            trainer: runs all local trainings of a round.
            evaluator: scores global states.
            reporter: computes what clients and server report.
            costs: turns what happened into bytes and FLOPs.

        Raises:
            UserError: for a method that cannot be run.
        """
        for lane in lanes:
            check_method(lane.method)
        self.dataset = dataset
        self.lanes = list(lanes)
        self.states = start.clone()  # [R, d]
        self.trainer = trainer
        self.evaluator = evaluator
        self.reporter = reporter
        self.costs = costs
        self.rounds: list[LaneRound] = []  # the current round, lane by lane
        self._keeps_lanes_separate = keeps_lanes_separate(start.device)
        self._lanes_changed = True  # what is gathered below belongs to other lanes
        self._client_rows = ClientRows()
        self._proxy_sets: list[EvaluationSet] = []
        self._test_sets: list[EvaluationSet] = []

    def start_round(self) -> RunningTraining:
        """Determine who is visible; launch the training of those who train before the choice.

        On a GPU they are still training when this returns.
        """
        if self._lanes_changed:
            self._gather_data()
        self.rounds = [LaneRound.begin(lane) for lane in self.lanes]
        visible_ids: dict[int, Tensor] = {}  # of lanes that train before the choice
        for r, lane in enumerate(self.lanes):
            if lane.trains_first and not self.rounds[r].passes:
                visible_ids[r] = self.rounds[r].ids
        if not visible_ids:
            return RunningTraining((), None)
        states = self.states.clone()
        return launch(self.trainer, self.lanes, states, visible_ids, self._client_rows)

    def views(self, training: RunningTraining) -> list[View | None]:
        """Return what each lane's server sees; None where there is nobody to choose from.

        A client whose update is not finite is left out.

        Args:
            training: what `start_round` returned; it is waited for.
        """
        for r, clients in training.wait().items():
            lane_round = self.rounds[r]
            lane_round.note_training(self.lanes[r], lane_round.ids, clients)
            lane_round.candidates = clients
            lane_round.ids = clients.ids
            lane_round.sizes = self.lanes[r].population.sizes[clients.ids]
        can_choose: list[int] = []  # lanes in which there is somebody to choose from
        requests: dict[int, ReportRequest] = {}
        for r, lane in enumerate(self.lanes):
            lane_round = self.rounds[r]
            if lane_round.passes or not len(lane_round.ids):
                continue
            can_choose.append(r)
            needs = lane.method.selector.needs
            if needs:
                requests[r] = ReportRequest(
                    names=needs,
                    population=lane.population,
                    state=self.states[r],
                    ids=lane_round.ids,
                    clients=lane_round.candidates,
                )
        reports = self.reporter.report(requests) if requests else {}
        for r in can_choose:
            self.rounds[r].view = self._view(r, reports.get(r, {}))
        return [lane_round.view for lane_round in self.rounds]

    def _view(self, r: int, reports: Mapping[str, Tensor]) -> View:
        """Return what the server of one lane sees."""
        lane = self.lanes[r]
        lane_round = self.rounds[r]
        from_clients: dict[str, Tensor] = {}
        from_server: dict[str, Tensor] = {}
        for name, report in reports.items():
            if name in SERVER_REPORTS:
                from_server[name] = report
            else:
                from_clients[name] = report
        return View(
            round_num=lane.round_num,
            ids=lane_round.ids.clone(),  # a selector may change what it is given
            sizes=lane_round.sizes.clone(),
            reports=from_clients,
            server=from_server,
            rng=rng.generator(lane.seed, "select", lane.round_num),
        )

    def collect(self, choices: Sequence[Choice | None]) -> dict[int, TrainedClients]:
        """Return the finite updates of the chosen clients, by lane; they train if nobody has yet.

        Args:
            choices: of each lane, legal ones (`check_choice`); None lets the round pass.
        """
        chosen: dict[int, Choice] = {}
        early: dict[int, TrainedClients] = {}  # candidates of lanes that have trained
        late_ids: dict[int, Tensor] = {}  # chosen clients of lanes that have not
        for r, choice in enumerate(choices):
            if choice is None:
                continue
            chosen[r] = choice
            candidates = self.rounds[r].candidates
            if candidates is None:
                late_ids[r] = self.rounds[r].ids[choice.slots]
            else:
                early[r] = candidates
        updates: dict[int, TrainedClients] = {}
        if early:
            slots = [chosen[r].slots for r in early]
            picked = pick_each(list(early.values()), slots)
            updates |= zip(early, picked, strict=True)
        if late_ids:
            states = self.states.clone()
            training = launch(self.trainer, self.lanes, states, late_ids, self._client_rows)
            trained = training.wait()
            if any(self.lanes[r].method.schedule == "sequential" for r in late_ids):
                trained |= train_in_turn(
                    self.trainer,
                    self.lanes,
                    states,
                    late_ids,
                    trained,
                    self._client_rows,
                )
            for r, clients in trained.items():
                self.rounds[r].note_training(self.lanes[r], late_ids[r], clients)
            updates |= trained
        for r, choice in chosen.items():
            self.rounds[r].select(choice, updates[r])
        if any(self.lanes[r].needs_after for r in chosen):
            self._collect_reports(updates)
        return updates

    def aggregate(self, updates: Mapping[int, TrainedClients]) -> None:
        """Make the next global models from what `collect` returned; the round is over for them.

        On a GPU, lanes that aggregate in the same way do it in one pass.
        """
        num_params = self.reporter.num_params
        groups: dict[Hashable, list[int]] = {}
        for r, clients in updates.items():
            if not len(clients.ids):
                continue  # no update was finite: the model stays
            lane = self.lanes[r]
            key = None
            if not self._keeps_lanes_separate:
                key = batch_key(lane.method.aggregator)
            if key is None:
                step_alone(lane, self.rounds[r], self.states[r], clients, num_params)
            else:
                groups.setdefault((key, len(clients.ids)), []).append(r)
        for members in groups.values():
            lanes_at_once = max(LARGEST_PASS // updates[members[0]].states.numel(), 1)
            for first in range(0, len(members), lanes_at_once):
                positions = members[first : first + lanes_at_once]
                self.states[positions] = step_together(
                    [self.lanes[r] for r in positions],
                    [self.rounds[r] for r in positions],
                    self.states[positions],
                    [updates[r] for r in positions],
                    num_params,
                )
        for lane, lane_round in zip(self.lanes, self.rounds, strict=True):
            lane_round.candidates = None  # the states of all clients, which take much memory
            lane.round_num += 1

    def score(self, on_test: Sequence[bool]) -> RoundResults:
        """Start to score the new global models; returns the results of the round.

        Args:
            on_test: lanes whose model is scored on the test set, too.
        """
        chose: set[int] = set()
        due: set[int] = set()
        for r, lane_round in enumerate(self.rounds):
            if lane_round.selected is not None:
                chose.add(r)
            if on_test[r]:
                due.add(r)
        return RoundResults(
            lanes=list(self.lanes),
            rounds=self.rounds,
            proxy_scores=self._start_scores(self._proxy_sets, chose),
            test_scores=self._start_scores(self._test_sets, due),
            costs=self.costs,
        )

    def _start_scores(
        self, sets: Sequence[EvaluationSet], lanes: Container[int]
    ) -> list[PendingScores]:
        """Start to score the global models of some lanes, given by their positions."""
        pending: list[PendingScores] = []
        for examples in sets:
            rows = [row for row, r in enumerate(examples.positions) if r in lanes]
            if not rows:
                continue
            x = examples.x
            y = examples.y
            if x.stride(0) == 0:  # the same for all
                x = x[: len(rows)]
                y = y[: len(rows)]
            elif len(rows) < len(x):
                x = x[rows]
                y = y[rows]
            positions = [examples.positions[row] for row in rows]
            logits = self.evaluator.logits_of(self.states[positions], x)
            pending.append(PendingScores(positions, logits, y))
        return pending

    def retire(self, lanes: Sequence[Lane]) -> None:
        """Take lanes out of the world between two rounds; the others continue."""
        retired = {id(lane) for lane in lanes}
        remaining = [r for r, lane in enumerate(self.lanes) if id(lane) not in retired]
        self.lanes = [self.lanes[r] for r in remaining]
        self.states = self.states[remaining]
        self._lanes_changed = True

    def restart(self, r: int, lane: Lane, state: Tensor) -> None:
        """Replace lane `r` by another federation at its initial state `[d]`."""
        check_method(lane.method)
        self.lanes[r] = lane
        self.states[r] = state
        self._lanes_changed = True

    def lane_state(self, r: int) -> dict[str, Any]:
        """Return everything a lane needs to continue between two rounds, except its selector."""
        lane = self.lanes[r]
        aggregator_state = lane.method.aggregator.state_dict()
        check_state(lane.method.aggregator, aggregator_state)
        return {
            "round": lane.round_num,
            "visits": lane.visits,
            "state": self.states[r].cpu().clone(),
            "aggregator": aggregator_state,
            "reward": lane.reward.state_dict(),
        }

    def load_lane_state(self, r: int, saved: Mapping[str, Any]) -> None:
        """Let a lane continue from what `lane_state` returned."""
        lane = self.lanes[r]
        lane.round_num = saved["round"]
        lane.visits = saved["visits"]
        self.states[r] = saved["state"].to(self.states.device)
        lane.method.aggregator.load_state_dict(_on_device(saved["aggregator"], self.states))
        lane.reward.load_state_dict(saved["reward"])

    def _collect_reports(self, updates: Mapping[int, TrainedClients]) -> None:
        """Add what the chosen send with their updates; probes are at the global model."""
        requests: dict[int, ReportRequest] = {}
        for r, clients in updates.items():
            lane = self.lanes[r]
            if lane.needs_after:
                requests[r] = ReportRequest(
                    names=lane.needs_after,
                    population=lane.population,
                    state=self.states[r],
                    ids=clients.ids,
                    clients=clients,
                )
        for r, reports in self.reporter.report(requests).items():
            self.rounds[r].reports = reports

    def _gather_data(self) -> None:
        """Gather the data of all lanes where they train and are scored, once for many rounds."""
        device = self.states.device
        populations = [lane.population for lane in self.lanes]
        self._client_rows.hold(populations, device)
        by_size: dict[int, list[int]] = {}  # proxy sets of one size are scored together
        for r, lane in enumerate(self.lanes):
            by_size.setdefault(len(lane.population.proxy), []).append(r)
        self._proxy_sets.clear()
        for positions in by_size.values():
            xs: list[Tensor] = []
            ys: list[Tensor] = []
            for r in positions:
                x, y = proxy_examples(self.lanes[r].population)
                xs.append(x)
                ys.append(y)
            self._proxy_sets.append(EvaluationSet(positions, torch.stack(xs), torch.stack(ys)))
        num_lanes = len(self.lanes)
        x = self.dataset.x_test
        y = self.dataset.y_test
        test_set = EvaluationSet(
            positions=range(num_lanes),
            x=x.expand(num_lanes, *x.shape),
            y=y.expand(num_lanes, -1),
        )
        self._test_sets = [test_set]
        self._lanes_changed = False


def _on_device(value: Any, like: Tensor) -> Any:
    """Move the model states in a saved tree to where `like` `[R, d]` is; leave the rest."""
    if isinstance(value, dict):
        return {key: _on_device(entry, like) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_device(entry, like) for entry in value)
    if isinstance(value, Tensor) and value.shape[-1:] == like.shape[-1:]:
        return value.to(like.device)
    return value
