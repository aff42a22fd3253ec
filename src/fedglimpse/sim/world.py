"""The simulated federation: something a server can only observe and commit to.

A World runs R lanes (seeds, or methods on the same model) in step. It knows nothing about methods
beyond what a selector needs, and nothing about files or progress bars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedglimpse import rng
from fedglimpse.cost import CostModel
from fedglimpse.data.dataset import Dataset
from fedglimpse.sim.evaluate import Evaluator
from fedglimpse.sim.jobs import LocalTrainer
from fedglimpse.sim.lane import Lane, LaneRound, check_choice, check_lane
from fedglimpse.sim.reports import Reporter, TrainedClients, proxy_examples
from fedglimpse.sim.training import Finished, train_round
from fedglimpse.types import Choice, Outcome, Update, View

__all__ = ["Lane", "World"]


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
        self.dataset, self.lanes, self.states = dataset, list(lanes), start.clone()
        self.trainer, self.evaluator, self.reporter = trainer, evaluator, reporter
        self.costs = costs
        self._now: list[LaneRound] = []
        for lane in self.lanes:
            check_lane(lane)

    def observe(self) -> list[View | None]:
        """Return what each lane's server sees; None where it has nothing to choose from.

        Selectors that need trained reports make all their visible clients train here, all lanes
        together. A client whose update is not finite is left out of the view.
        """
        self._now = [LaneRound.begin(lane) for lane in self.lanes]
        lanes = list(enumerate(zip(self.lanes, self._now, strict=True)))
        early = {r: now.ids for r, (lane, now) in lanes if lane.trains_first and not now.idle}
        for r, done in self._train(early).items():
            self._now[r].clients, self._now[r].ids = done.clients, done.clients.ids
        for r, (_, now) in lanes:
            if not now.idle and len(now.ids):
                now.view = self._view(r)
        return [now.view for now in self._now]

    def commit(self, choices: Sequence[Choice | None]) -> list[Outcome | None]:
        """Aggregate what was chosen; returns what came of it, lane by lane."""
        chosen: dict[int, Choice] = {}
        for r, (now, choice) in enumerate(zip(self._now, choices, strict=True)):
            if now.view is not None and choice is not None:
                lane = self.lanes[r]
                check_choice(choice, now.view, lane.method.budget(lane.k, now.view.num_visible))
                chosen[r] = choice
        late = {r: c for r, c in chosen.items() if self._now[r].clients is None}
        trained = self._train({r: self._now[r].ids[c.slots] for r, c in late.items()})
        outcomes: list[Outcome | None] = [None] * len(self.lanes)
        for r, choice in chosen.items():
            early, weights = self._now[r].clients, choice.weights
            if early is not None:
                clients = early.pick(choice.slots)
            else:
                clients, kept = trained[r].clients, trained[r].kept
                weights = None if weights is None else weights[kept]
            self._now[r].info = choice.info
            outcomes[r] = self._aggregate(r, clients, weights)
        for lane in self.lanes:
            lane.round_num += 1
        return outcomes

    def records(
        self, metrics: Sequence[Mapping[str, float]], evaluate: Sequence[bool]
    ) -> list[dict[str, Any]]:
        """Return one record for each lane of the round that was just committed.

        Args:
            metrics: what each selector's feedback returned.
            evaluate: which lanes' new global models are scored on the test set.
        """
        return [self._record(r, metrics[r], evaluate[r]) for r in range(len(self.lanes))]

    def retire(self, lanes: Sequence[Lane]) -> None:
        """Take lanes out of the world; the others go on."""
        gone = {id(lane) for lane in lanes}
        keep = [r for r, lane in enumerate(self.lanes) if id(lane) not in gone]
        self.lanes, self.states = [self.lanes[r] for r in keep], self.states[keep]

    def restart(self, r: int, lane: Lane, state: Tensor) -> None:
        """Put another federation in the place of lane `r`, at its initial state `[d]`."""
        check_lane(lane)
        self.lanes[r] = lane
        self.states[r] = state

    def lane_state(self, r: int) -> dict[str, Any]:
        """Everything a lane needs to continue between two rounds, but for its selector."""
        lane = self.lanes[r]
        return {
            "round": lane.round_num,
            "state": self.states[r].cpu().clone(),
            "aggregator": lane.method.aggregator.state_dict(),
            "reward": lane.reward.state_dict(),
        }

    def load_lane_state(self, r: int, saved: Mapping[str, Any]) -> None:
        """Let a lane continue from what `lane_state` returned."""
        lane = self.lanes[r]
        lane.round_num = saved["round"]
        self.states[r] = saved["state"].to(self.states.device)
        lane.method.aggregator.load_state_dict(_on_device(saved["aggregator"], self.states))
        lane.reward.load_state_dict(saved["reward"])

    def _view(self, r: int) -> View:
        lane, now = self.lanes[r], self._now[r]
        needs, population = lane.method.selector.needs, lane.population
        reports = self.reporter.probes(needs, self.states[r], population, now.ids)
        if now.clients is not None:
            reports |= self.reporter.trained(needs, now.clients, population)
        return View(
            round_num=lane.round_num,
            ids=now.ids,
            sizes=population.sizes[now.ids],
            reports=reports,
            server=self.reporter.server(needs, self.states[r], population),
            rng=rng.generator(lane.seed, "select", lane.round_num),
        )

    def _train(self, ids_of: Mapping[int, Tensor]) -> dict[int, Finished]:
        """Train these clients of these lanes and note who trained."""
        trained = train_round(self.trainer, self.lanes, self.states, ids_of)
        for r, done in trained.items():
            now, losses = self._now[r], done.clients.loss
            now.trained, now.rejected = ids_of[r].tolist(), done.rejected
            now.train_loss = float(losses.mean()) if len(losses) else None
        return trained

    def _aggregate(self, r: int, clients: TrainedClients, weights: Tensor | None) -> Outcome:
        lane, now = self.lanes[r], self._now[r]
        sizes = lane.population.sizes[clients.ids]
        weights = sizes.double() / sizes.sum() if weights is None else weights.double()
        reports = self._reports_after(r, clients)
        if len(clients.ids):
            aggregator = lane.method.aggregator
            update = Update(
                round_num=lane.round_num,
                ids=clients.ids,
                sizes=sizes,
                starts=clients.starts,
                deltas=clients.deltas,
                weights=weights.to(self.states),
                num_params=self.reporter.num_params,
                reports={n: reports[n] for n in aggregator.needs if n in reports},
            )
            self.states[r] = aggregator.step(self.states[r].clone(), update)
            if aggregator.applied is not None:
                weights = aggregator.applied.cpu().double()
        now.selected, now.weights = clients.ids.tolist(), weights.tolist()
        scores = self.evaluator.score(self.states[r], *proxy_examples(lane.population))
        reward, per_class = lane.reward.update(scores)
        learns_from = lane.method.selector.learns_from
        return Outcome(
            round_num=lane.round_num,
            selected=clients.ids,
            reward=reward,
            score=lane.reward.score(scores),
            per_class=scores.per_class_f1,
            reward_per_class=per_class,
            weights=weights.float(),
            reports={n: reports[n] for n in learns_from if n in reports},
        )

    def _reports_after(self, r: int, clients: TrainedClients) -> dict[str, Tensor]:
        """Return what the chosen send with their updates; probes are at the global model."""
        names, population = self.lanes[r].needs_after, self.lanes[r].population
        return {
            **self.reporter.probes(names, self.states[r], population, clients.ids),
            **self.reporter.trained(names, clients, population),
            **self.reporter.server(names, self.states[r], population),
        }

    def _record(self, r: int, metrics: Mapping[str, float], evaluate: bool) -> dict[str, Any]:
        lane, now = self.lanes[r], self._now[r]
        test = (self.dataset.x_test, self.dataset.y_test)
        scores = self.evaluator.score(self.states[r], *test) if evaluate else None
        cost = self.costs.round(now.activity(lane, int(metrics.get("server_flops", 0))))
        return {
            "lane": r,
            "seed": lane.seed,
            "round": lane.round_num - 1,
            "visible": now.visible,
            "selected": now.selected,
            "rejected": now.rejected,
            "weights": now.weights,
            "accuracy": None if scores is None else scores.accuracy,
            "macro_f1": None if scores is None else scores.macro_f1,
            "per_class_f1": None if scores is None else scores.per_class_f1.tolist(),
            "loss": None if scores is None else scores.loss,
            "train_loss": now.train_loss,
            "reward": lane.reward.total,
            **now.info,
            **{k: v for k, v in metrics.items() if k != "server_flops"},
            **vars(cost),
        }


def _on_device(value: Any, like: Tensor) -> Any:
    """Move the model states in a saved tree to where `like` `[R, d]` is; leave the rest."""
    if isinstance(value, dict):
        return {k: _on_device(v, like) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_device(v, like) for v in value)
    if isinstance(value, Tensor) and value.shape[-1:] == like.shape[-1:]:
        return value.to(like.device)
    return value
